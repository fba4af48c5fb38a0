"""Our names in SGLang's lists, over stand-ins for SGLang's modules."""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rocm_attn.integrations.plugins import SGLANG
from rocm_attn.machine.settings import WATCH_STATES
from tests.amd.integrations.modules import install

STOCK = ["triton", "aiter"]
REGISTRATION = "rocm_attn.integrations.sglang.registration"


class SGLang:
    """The lists, the registry and the hooks of SGLang's plug-ins."""

    def __init__(self) -> None:
        lists = {
            name: list(STOCK)
            for name in (
                "ATTENTION_BACKEND_CHOICES",
                "DRAFT_ATTENTION_BACKEND_CHOICES",
                "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
                "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
            )
        }
        self.lists = lists
        self.backends: dict[str, Callable[[Any], Any]] = {}
        self.hooks: dict[str, Callable[..., Any]] = {}
        self.choices: Any = SimpleNamespace(
            **lists,
            add_attention_backend_choices=lists["ATTENTION_BACKEND_CHOICES"].extend,
            add_draft_attention_backend_choices=lists["DRAFT_ATTENTION_BACKEND_CHOICES"].extend,
            add_deterministic_attention_backend_choices=lists["DETERMINISTIC_ATTENTION_BACKEND_CHOICES"].extend,
            add_radix_supported_deterministic_attention_backend_choices=lists[
                "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND"
            ].extend,
        )

    def register(self, name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        def keep(create: Callable[[Any], Any]) -> Callable[[Any], Any]:
            self.backends[name] = create
            return create

        return keep

    def modules(self) -> dict[str, dict[str, Any]]:
        """Returns the values of SGLang's modules by their names."""
        hooks = SimpleNamespace(register=lambda target, hook, kind: self.hooks.__setitem__(target, hook))
        return {
            "sglang": {"__version__": "0.5.23"},
            "sglang.srt.arg_groups": {"choices": self.choices},
            "sglang.srt.layers.attention.attention_registry": {"register_attention_backend": self.register},
            "sglang.srt.plugins.hook_registry": {
                "HookRegistry": hooks,
                "HookType": SimpleNamespace(AROUND="around", AFTER="after"),
            },
            "sglang.srt.runtime_context": {
                "attention_backends": lambda: ("triton", "rocm_attn"),
                "get_spec": lambda: SimpleNamespace(speculative_attention_mode="prefill"),
            },
        }


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SGLang:
    stand = SGLang()
    install(monkeypatch, stand.modules())
    return stand


@pytest.fixture
def registration(sglang: SGLang) -> Iterator[Any]:
    """Yields our module over SGLang's, hidden from other tests."""
    yield importlib.import_module(REGISTRATION)
    del sys.modules[REGISTRATION]


def test_the_name_is_in_every_list_once_however_often_the_plugin_is_loaded(sglang: SGLang, registration: Any) -> None:
    registration.register_names()
    registration.register_names()
    assert all(names == [*STOCK, "rocm_attn"] for names in sglang.lists.values())
    assert [*sglang.backends] == ["rocm_attn"]


def test_the_name_of_a_built_in_backend_is_taken_when_it_is_asked_for(
    sglang: SGLang, registration: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(SGLANG), "taken", lambda plugin: ("aiter",))
    registration.register_names()
    assert [*sglang.backends] == ["rocm_attn", "aiter"]
    assert sglang.lists["ATTENTION_BACKEND_CHOICES"] == [*STOCK, "rocm_attn"]


def create_backend(factory: Any, backend_name: str, backend_map: Any, template: str, stamps_children: bool) -> Any:
    """DraftBackendFactory._create_backend, without the wrappers of some models."""
    configured = "rocm_attn" if backend_name == "decode_attention_backend" else "triton"
    stamp, backend = backend_map[factory.draft_attn_backend or configured]()
    return stamp, backend, stamps_children


@pytest.mark.parametrize(
    ("named", "configured", "has_steps", "made"),
    [
        ("triton", "decode_attention_backend", True, "SGLang's"),
        (None, "prefill_attention_backend", False, "SGLang's"),
        (None, "decode_attention_backend", True, ("steps", "the draft's", 2, 3)),
        ("rocm_attn", "prefill_attention_backend", True, ("steps", "the draft's", 2, 3)),
        ("rocm_attn", "prefill_attention_backend", False, ("backend", "the draft's")),
    ],
)
def test_backends_of_draft_models_are_ours_where_the_draft_or_the_server_names_us(
    named: str | None,
    configured: str,
    has_steps: bool,
    made: Any,
    sglang: SGLang,
    registration: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's factory makes them: it refuses models first, and wraps what some need."""
    drafts = SimpleNamespace(create_draft_steps=lambda *given: ("steps", *given))
    monkeypatch.setitem(sys.modules, "rocm_attn.integrations.sglang.drafts", drafts)
    monkeypatch.setattr(registration, "_create", lambda runner: ("backend", runner))
    registration.register_names()
    (hook,) = [hook for name, hook in sglang.hooks.items() if name.endswith("DraftBackendFactory._create_backend")]
    factory = SimpleNamespace(
        draft_attn_backend=named, speculative_num_steps=3, topk=2, draft_model_runner="the draft's"
    )
    own = {"triton": lambda: ("triton", "SGLang's")}
    more = {"stamps_children": True} if has_steps else {}
    stamp = "triton" if made == "SGLang's" else "rocm_attn"
    assert hook(create_backend, factory, configured, own, "", **more) == (stamp, made, has_steps)
    assert [*own] == ["triton"]


def test_weights_are_read_again_after_an_update_if_a_backend_of_ours_was_made(
    sglang: SGLang, registration: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registration.register_names()
    updates = [hook for name, hook in sglang.hooks.items() if ".WeightUpdater." in name]
    assert len(updates) == 5
    renewed: list[str] = []
    hooks = "rocm_attn.integrations.sglang.hooks"
    updater = SimpleNamespace(get_model_runner=lambda: "the runner")
    for is_made in (True, False):
        if is_made:
            monkeypatch.setitem(sys.modules, hooks, SimpleNamespace(renew_weights=renewed.append))
        else:
            monkeypatch.delitem(sys.modules, hooks)
        assert updates[0]((True, "done"), updater, "a path") is None
        assert renewed == ["the runner"]


@pytest.mark.parametrize("value", ["", "0", "1"])
@pytest.mark.parametrize("has_states", [True, False])
def test_states_are_watched_if_that_is_asked_for_and_the_model_has_some(
    has_states: bool, value: str, sglang: SGLang, registration: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend of recurrent layers is made after ours."""
    order: list[str] = []
    for name, function in (
        ("backend", SimpleNamespace(create=lambda runner: order.append("created"))),
        ("state_hooks", SimpleNamespace(watch=lambda: order.append("watched"))),
        ("latent", SimpleNamespace(attend_over_latent_rows=None, choose_by_our_kernels=None)),
    ):
        monkeypatch.setitem(sys.modules, f"rocm_attn.integrations.sglang.{name}", function)
    monkeypatch.setenv(WATCH_STATES, value)
    registration.register_names()
    pool = SimpleNamespace(mamba_pool=None) if has_states else SimpleNamespace()
    sglang.backends["rocm_attn"](SimpleNamespace(use_mla_backend=False, req_to_token_pool=pool))
    assert order == ["watched"] * (has_states and value == "1") + ["created"]
