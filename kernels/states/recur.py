"""recur: the recurrence of a layer in a step, token by token or, for prompts, in chunks.

Both share a step: sequences with few new tokens are taken token by token, and those with more in chunks. The padded
shape determines whether there can be any of the latter, so that a graph always has the same launches.
"""

from rocm_attn.kernels.backend import on_hopper
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.states.arguments import RecurArgs
from rocm_attn.kernels.states.chunk_rows import launch_chunk_rows
from rocm_attn.kernels.states.chunk_walk import launch_chunk_walk
from rocm_attn.kernels.states.token_steps import launch_token_steps

# With fewer new tokens than this, a sequence is not worth a chunk.
_LEAST_CHUNK = 16


@only_launches
def launch_recur(args: RecurArgs, *, deterministic: bool) -> None:
    """Writes every row of tokens.out, and the target slots.

    deterministic: whether a sequence's bits must depend on nothing but itself: all its tokens are taken one by one
    """
    args.slots.check(args.tokens, args.places)
    most_q_len = max(args.slots.most_kept, _LEAST_CHUNK - 1)
    if deterministic or args.places.max_q_len <= most_q_len:
        launch_token_steps(args, most_q_len=args.places.max_q_len, clears=True)
        return
    launch_token_steps(args, most_q_len=most_q_len, clears=False)
    if on_hopper():
        # Not every release of Triton has the Gluon that these are written in.
        from rocm_attn.kernels.hopper.state_rows import launch_hopper_chunk_rows
        from rocm_attn.kernels.hopper.state_walk import launch_hopper_chunk_walk

        launch_hopper_chunk_rows(args, most_q_len=most_q_len)
        launch_hopper_chunk_walk(args, most_q_len=most_q_len)
    else:
        launch_chunk_rows(args, most_q_len=most_q_len)
        launch_chunk_walk(args, most_q_len=most_q_len)
