"""Each of FlashInfer's names is served, or refused by the module itself with a reason."""

import importlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from rocm_attn.errors import Unsupported
from rocm_attn.integrations import flashinfer
from rocm_attn.integrations.flashinfer.names import REFUSED, TABLES, NotImportable, NotServed
from tests.amd.integrations import flashinfer_page
from tests.amd.integrations.signatures import recorded_names

NAMES = recorded_names()
REFUSED_NAMES = [name for names in TABLES["names"].values() for name in names]
# Names here that are not at FlashInfer's top: its modules, a value of its mla, and the choice of kernels.
OURS = {"MLAPlanMetadata", "use_provider"} | {module for module in NAMES.values() if "." not in module}


def test_each_name_of_flashinfers_is_in_one_of_the_two_lists() -> None:
    served = set(flashinfer.__all__)
    assert len(NAMES) > 200
    assert len(set(REFUSED_NAMES)) == len(REFUSED_NAMES)
    assert not served & set(REFUSED_NAMES)
    assert served | set(REFUSED_NAMES) == NAMES.keys() | (served & OURS)


def test_each_served_name_is_there() -> None:
    for name in flashinfer.__all__:
        assert getattr(flashinfer, name) is not None
        assert name in dir(flashinfer)


@pytest.mark.parametrize("name", REFUSED_NAMES)
def test_a_refused_name_says_why_and_what_to_use(name: str) -> None:
    with pytest.raises(NotServed, match=f"^flashinfer.{name} is not served: .+; .*[a-zA-Z0-9)]$"):
        getattr(flashinfer, name)


def test_an_import_says_why_too_and_a_question_gets_an_answer() -> None:
    with pytest.raises(NotImportable, match=r"flashinfer\.xqa is not served: it runs NVIDIA's own kernels; use Batch"):
        exec("from rocm_attn.integrations.flashinfer import xqa")
    assert issubclass(NotImportable, ImportError)
    assert issubclass(NotImportable, Unsupported)
    assert not hasattr(flashinfer, "xqa")
    assert getattr(flashinfer, "gdn_fused_decode_step", None) is None
    with pytest.raises(AttributeError, match="no attribute 'merge_stat'; did you mean merge_state"):
        getattr(flashinfer, "merge_" + "stat")
    with pytest.raises(ImportError, match="cannot import name 'merge_stat'"):
        exec("from rocm_attn.integrations.flashinfer import merge_stat")


def test_a_reason_leads_to_names_that_are_served() -> None:
    led = {name for reason in REFUSED.values() for name in re.findall(r"\w+(?:Wrapper|_cache|_probs)\b", reason)}
    assert led > {"BatchDecodeWithPagedKVCacheWrapper", "append_paged_kv_cache", "top_k_top_p_sampling_from_probs"}
    assert led <= set(flashinfer.__all__)


def test_an_attribute_that_engines_read_says_why_it_is_missing() -> None:
    wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, dtype=torch.uint8))
    with pytest.raises(NotServed, match=r"Wrapper\._cached_module is not served: there is no CUDA module; call plan"):
        _ = wrapper._cached_module
    assert getattr(wrapper, "_plan_info", None) is None
    with pytest.raises(AttributeError, match="has no attribute 'made_up'"):
        _ = wrapper.made_up


def test_the_page_has_the_tables_of_the_code() -> None:
    assert flashinfer_page.PAGE.read_text(encoding="utf-8") == flashinfer_page.page()


def test_the_module_imports_its_parts_when_they_are_used() -> None:
    code = "import sys, rocm_attn.integrations.flashinfer; print('torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "False"
    assert importlib.import_module("rocm_attn.integrations.flashinfer").decode is flashinfer.decode
