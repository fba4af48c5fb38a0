"""Adapters for other engines and libraries: vLLM, SGLang, FlashInfer's API, torch.compile, KV transfer, offloading."""
