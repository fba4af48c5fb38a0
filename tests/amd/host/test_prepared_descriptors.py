"""Prepared calls of kernels with descriptors of pages (TMA): the map of each is made once per address."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from rocm_attn.kernels import driver_call
from rocm_attn.kernels.driver_call import DescribedPlace
from rocm_attn.kernels.launch import launch
from tests.amd.host.test_prepared_calls import Kernel, calls_after, made_again, rows


class Descriptor(SimpleNamespace):
    """A descriptor of a tensor, as passed to kernels; a launcher makes a map of it in each launch."""

    @classmethod
    def of(cls, tensor: Tensor) -> Descriptor:
        return cls(base=tensor, shape=list(tensor.shape), strides=list(tensor.stride()), padding="zero")


@dataclass
class DescribedKernel(Kernel):
    """A jitted function with a launcher like Triton 3.6's for kernels with descriptors."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda *args, **options: SimpleNamespace(
            run=_Launcher(self._launch()), function="function", packed_metadata="metadata"
        )

    def _launch(self) -> Callable[..., None]:
        launcher, tensordesc_meta = self._run, [{"of": "k"}, {"of": "v"}]

        def inner(*args: object) -> None:
            raise AssertionError(f"maps are made anew by {launcher} with {tensordesc_meta}")

        return inner


class _Launcher:
    """Looks for scratch memory and then calls launch."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch

    def __call__(self, *args: object) -> None:
        self.launch(*args)


def test_each_launch_of_a_call_has_its_own_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_call, "_map_of", lambda place, metadata: lambda address: (metadata["of"], address))
    kernels, (q, k, v) = [DescribedKernel(("q", "k", "v")) for _ in range(2)], [rows() for _ in range(3)]

    def make() -> None:
        launch(kernels[0], (3,), q, Descriptor.of(k), Descriptor.of(v))
        launch(kernels[1], (3,), q, Descriptor.of(v), Descriptor.of(k))

    calls, call = calls_after(make, q, k, v)
    other_k = rows()
    assert made_again(calls, call._replace(addresses=(q.data_ptr(), other_k.data_ptr(), v.data_ptr())))
    places = other_k.data_ptr(), v.data_ptr()
    for kernel, (of_k, of_v) in zip(kernels, (places, places[::-1]), strict=True):
        assert [each for each in kernel.ran[-1] if isinstance(each, tuple)] == [("k", of_k), ("v", of_v)]


@pytest.mark.parametrize("change", ["memory of its own", "another launcher", "no metadata"])
def test_descriptors_that_are_not_understood_are_not_prepared(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, q, k = DescribedKernel(("q", "k", "v", "n", "G")), rows(), rows()
    v = k if change != "memory of its own" else rows(6)
    if change == "another launcher":
        kernel._launch = lambda: lambda *args: None  # type: ignore[method-assign]
    elif change == "no metadata":
        launcher, tensordesc_meta = kernel._run, [None, None]
        kernel._launch = lambda: lambda *args: launcher(*args, tensordesc_meta)  # type: ignore[method-assign]
    calls, call = calls_after(lambda: launch(kernel, (3,), q, Descriptor.of(k), Descriptor.of(v), 7, G=1), q, k)
    assert not made_again(calls, call)


def test_a_map_is_of_its_address_and_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own function makes it, for a descriptor of the place's shape."""
    made = []

    def arguments(described: Any, metadata: object) -> list[object]:
        made.append((described.base.data_ptr(), described.shape, described.strides, described.padding, metadata))
        return [f"map of {described.base.data_ptr()}", *described.shape, *described.strides]

    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", arguments)
    map_of = driver_call._map_of(DescribedPlace(2, (4, 8), (8, 1), "zero"), {"swizzle": 3})
    assert map_of is not None
    assert [map_of(address) for address in (16, 32, 16)] == ["map of 16", "map of 32", "map of 16"]
    assert made == [(address, [4, 8], [8, 1], "zero", {"swizzle": 3}) for address in (16, 32)]
