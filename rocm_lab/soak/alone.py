"""ServedAlone: checks the promise of deterministic mode, in addition to the oracle's bounds.

Some sequences are served again, each alone, unpadded and eagerly, with all tokens of their KV in one step and one pool
for all layers. Their new tokens must get the same bits as in the step, whatever other sequences and steps there were.
"""

from dataclasses import replace

from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.check import bitwise_equal
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_lab.soak.judge import Played, place_of_tokens
from rocm_lab.soak.model import PLACES, LayerTables
from rocm_lab.soak.scene import Scene


class ServedAlone:
    """Serves one sequence of every `every`-th turn of a scene alone: the first, then the second and so on.

    num_seqs: sequences that were served
    """

    def __init__(self, scene: Scene, every: int) -> None:
        self.num_seqs, self._every, self._model = 0, every, scene.model
        options = RuntimeOptions(
            num_pages=1 + int(num_pages(scene.options.max_kv_len, scene.page_size)),
            max_num_seqs=1,
            max_kv_len=scene.options.max_kv_len,
            provider=scene.options.provider,
            deterministic=True,
        )
        recurrent = replace(scene.setting.recurrent, checkpoints=0)
        guards = scene.runtime.guards
        self._runtime = build_runtime(scene.setting.problems, options, recurrent, device=scene.device, guards=guards)
        for layer in range(len(scene.setting.problems)):
            self._runtime.head_weights.set(layer, scene.runtime.head_weights.of(layer))
        self._runner = StepRunner(self._runtime, self._model.forward, None)

    def check(self, step: Played) -> str:
        """Returns the difference of a step's sequence, or an empty string. The model's outputs are overwritten."""
        turn, rest = divmod(step.turn, self._every)
        if rest or not step.seqs or not step.seqs[turn % len(step.seqs)].ids:
            return ""
        number = turn % len(step.seqs)
        self.num_seqs += 1
        begin = sum(len(seq.ids) for seq in step.seqs[:number])
        places = place_of_tokens(step)
        assert not isinstance(places, str), "the oracle agrees with the step"
        at = places[begin : begin + len(step.seqs[number].ids)]
        for name, layer, given, alone in self._outputs(step, self._serve(step.stored[number]), len(at)):
            if not bitwise_equal(given[at], alone):
                error = float((given[at].double() - alone.double()).abs().max())
                return (
                    f"layer {layer}: {name} of row {step.seqs[number].row} differs bitwise from the same request run "
                    f"alone, by up to {error:g}"
                )
        return ""

    def _outputs(self, step: Played, kv_len: int, num_new: int) -> list[tuple[str, int, Tensor, Tensor]]:
        """Returns the name, layer, step's tensor and new tokens' tensor alone of each output."""
        new, found = slice(kv_len - num_new, kv_len), []
        for layer, alone in enumerate(self._model.outputs):
            found.append(("out", layer, step.outs[layer], alone.out[new]))
            if isinstance(alone, LayerTables) and layer in step.lses:
                found.append(("lse", layer, step.lses[layer], alone.lse[new]))
        return found

    def _serve(self, stored: list[int]) -> int:
        """Runs all tokens of a sequence in one step, by what each looks up. Returns their number."""
        table, row = self._runtime.table, self._runtime.table.admit()
        try:
            table.reserve(row, len(stored))
            self._runner.run(StepBatch([row], [len(stored)], [len(stored)], [entry // PLACES for entry in stored]))
            return len(stored)
        finally:
            table.free(row)
