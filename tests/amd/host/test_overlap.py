"""may_overlap() of tensors in one memory, and in memory of their own."""

import torch

from rocm_attn.step.tensor_checks import may_overlap


def test_only_memory_of_its_own_cannot_overlap() -> None:
    memory = torch.zeros(600)
    halves = [torch.frombuffer(memory.numpy().data[first : first + 300], dtype=torch.float32) for first in (0, 300)]
    for tensors, overlap in (
        ((torch.zeros(5, 24), torch.zeros(5, 24)), False),
        (halves, False),
        ((memory[:300], memory[200:500]), True),
        ((memory, halves[0]), True),
        ((memory[100:200], halves[1]), False),
        ((memory[200:400], halves[1]), True),
        ((memory.view(25, 24)[:, :8], memory.view(25, 24)[:, 8:16]), False),
        ((memory.view(25, 24)[:, :9], memory.view(25, 24)[:, 8:16]), True),
        ((memory.view(25, 24)[:20, 20:], memory.view(25, 24)[1:, :2]), False),
        ((memory[4:].view(-1, 4)[:140], memory.view(25, 24)[:, :4]), True),
        ((memory[:576].view(24, 24), memory[4:580].view(24, 24)), True),
        ((memory, torch.zeros(0)), False),
    ):
        one, other = tensors
        assert may_overlap(one, other) == may_overlap(other, one) == overlap
