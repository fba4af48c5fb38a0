"""StoredTokens: the numbers of stored tokens after steps of some rows, and of others."""

import numpy as np

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.paging.stored_tokens import Sides, StepStores, StoredTokens


def test_the_tokens_of_a_step_stay_noted_after_a_step_of_other_rows() -> None:
    """Nothing asks for them in between: lengths of that step may be known on the device alone."""
    tokens = StoredTokens(4)
    tokens.end_step(StepBatch([1, 2], [8, 3], [8, 3]), complete=True)
    tokens.end_step(StepBatch([2], [4], [1]), complete=True)
    assert tokens.stored_len.tolist() == [0, 8, 4, 0]


def test_a_row_without_new_tokens_has_stored_what_it_had() -> None:
    """A step may attend to fewer tokens than are stored, and its bound may be larger."""
    tokens = StoredTokens(4)
    tokens.mark(np.array([1, 2]), 8)
    tokens.end_step(StepBatch([1, 2, 3], [4, 12, 5], [0, 0, 5]), complete=True)
    assert tokens.stored_len.tolist() == [0, 8, 8, 5]


def test_a_row_that_is_shared_while_a_step_stores_tokens_again_has_those_before_them() -> None:
    tokens = StoredTokens(4)
    tokens.mark(np.array([1, 2, 3]), 8)
    stores = StepStores(Sides(1), tokens, lambda batch, needed: None)
    stores.begin(StepBatch([1, 2, 3], [4, 5, 9], [0, 1, 1]), 1, "", 1)
    tokens.on_share()
    assert tokens.stored_len.tolist() == [0, 8, 8, 8]
    stores.before_store(0, 0)
    tokens.on_share()
    assert tokens.stored_len.tolist() == [0, 8, 4, 8]


def test_what_a_step_left_out_is_named_by_its_layer() -> None:
    sides = Sides(3, indexed=(2,), folding=(1, 2), of_states=((0, "state"),))
    assert [sides.name(number) for number in range(len(sides))] == [
        "layer 0",
        "layer 1",
        "layer 2",
        "the index keys of layer 2",
        "the state of layer 1",
        "the state of layer 2",
        "the state of recurrent layer 0",
    ]
    assert sides.of_layer(2) == [2, 3, 5]
    assert sides.recurrent(0, "state") == 6
