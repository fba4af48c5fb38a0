"""The table of models by their names, generated from the table of families: python -m tests.amd.docs.model_list."""

from dataclasses import dataclass

from rocm_attn.models.families import FAMILIES
from rocm_attn.models.hf_compressed import compressed_layers
from rocm_attn.models.hf_recurrent import HybridAttention
from rocm_lab.page_parts import with_rows
from tests.amd.docs.pages import DOCS

PAGE = DOCS / "model_list.md"


@dataclass(frozen=True, slots=True)
class Named:
    """Models by the name that users know.

    architectures: their class in config.json, one or several
    weights: a clause about published weights, if the engine does not read them, or reads them as another class
    """

    name: str
    architectures: tuple[str, ...]
    weights: str = ""


_FP8 = "published in FP8: convert to bfloat16 first"
_GGUF = "yes, GGUF too"

MODELS = (
    Named("Llama 2, 3, 3.1, 3.2, 3.3 (text)", ("LlamaForCausalLM",)),
    Named("Llama 4", ("Llama4ForConditionalGeneration", "Llama4ForCausalLM")),
    Named("Mistral 7B, Ministral, Mistral Nemo, Mistral Small 3", ("MistralForCausalLM",), _GGUF),
    Named("Mixtral 8x7B, 8x22B", ("MixtralForCausalLM",)),
    Named("Phi-3, Phi-3.5, Phi-4", ("Phi3ForCausalLM",)),
    Named("Qwen2, Qwen2.5, QwQ", ("Qwen2ForCausalLM",)),
    Named("Qwen1.5-MoE, Qwen2-57B-A14B", ("Qwen2MoeForCausalLM",)),
    Named("Qwen3 0.6B to 32B", ("Qwen3ForCausalLM",)),
    Named("Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder", ("Qwen3MoeForCausalLM",)),
    Named("Qwen3-Next, Qwen3-Coder-Next", ("Qwen3NextForCausalLM",)),
    Named(
        "Qwen3.5, Qwen3.8 (text)",
        (
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        ),
    ),
    Named("Qwen3.8-Flash-Next", ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")),
    Named("Gemma 2", ("Gemma2ForCausalLM",)),
    Named("Gemma 3 (text)", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")),
    Named("EmbeddingGemma", ("Gemma3TextModel",)),
    Named("PaliGemma, PaliGemma 2", ("PaliGemmaForConditionalGeneration",)),
    Named("Gemma 3n (text)", ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration")),
    Named("Gemma 4 (text)", ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")),
    Named("gpt-oss-20b, gpt-oss-120b", ("GptOssForCausalLM",), "published in MXFP4: convert to bfloat16 first"),
    Named("DeepSeek-V2, V2-Lite, V2.5", ("DeepseekV2ForCausalLM",)),
    Named("DeepSeek-V3, V3.1, R1; Kimi-K2", ("DeepseekV3ForCausalLM",), _FP8),
    Named("DeepSeek-V3.2", ("DeepseekV32ForCausalLM",), _FP8),
    Named("DeepSeek-V4, V4.1", ("DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM")),
    Named("GLM-5, GLM-5.1", ("GlmMoeDsaForCausalLM",)),
    Named("GLM-5.3-Flash", ("Glm5NextForConditionalGeneration",)),
    Named("Bamba", ("BambaForCausalLM",)),
    Named("Falcon-H1", ("FalconH1ForCausalLM",)),
    Named("Nemotron-H, Nemotron Nano 2 (text), Nemotron 3 Nano and Super", ("NemotronHForCausalLM",)),
    Named("Kimi-Linear", ("KimiLinearForCausalLM",)),
    Named("Kimi-K3", ("KimiK3ForConditionalGeneration",)),
    Named("MiniCPM3", ("MiniCPM3ForCausalLM",)),
    Named("MiniMax-M2, M2.5", ("MiniMaxM2ForCausalLM",)),
    Named("BERT", ("BertModel", "BertForSequenceClassification")),
    Named("ModernBERT", ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification")),
    Named("RoBERTa", ("RobertaModel", "RobertaForSequenceClassification")),
    Named(
        "XLM-RoBERTa: multilingual-e5, BGE-M3, bge-reranker",
        ("XLMRobertaModel", "XLMRobertaForSequenceClassification"),
    ),
    Named("MiniMax-M3 (text)", ("MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForConditionalGeneration")),
)

# Hybrid models that were run in vLLM, where recurrent layers are vLLM's own.
_TRIED_HYBRIDS = ("Qwen3NextForCausalLM",)


def _row(model: Named) -> str:
    family = FAMILIES[model.architectures[0]]
    decoder = family.decoder
    engine = "no" if decoder is None else model.weights or (_GGUF if decoder.gguf else "yes")
    plugins = "yes"
    if family.attention is compressed_layers:
        plugins = "no"
    elif isinstance(family.attention, HybridAttention):
        is_tried = model.architectures[0] in _TRIED_HYBRIDS
        plugins = "its attention, [in vLLM](vllm.md#seen)" if is_tried else "not tried: it has recurrent layers"
    return f"| {model.name} | {engine} | {plugins} | {', '.join(f'`{name}`' for name in model.architectures)} |\n"


def page() -> str:
    """Returns the text of docs/model_list.md."""
    return with_rows(PAGE.read_text(), "models", map(_row, MODELS))


if __name__ == "__main__":
    PAGE.write_text(page())
