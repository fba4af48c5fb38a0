"""Flags of `vllm serve` -> ours, or why there is none: for a refusal's hint and for the page of the server's flags."""

# By their documentation (docs.vllm.ai, "Engine Arguments" and "OpenAI-Compatible Server").
FROM_VLLM: dict[str, tuple[str, ...]] = {
    "--served-model-name": ("--served-model-name",),
    "--host": ("--host",),
    "--port": ("--port",),
    "--api-key": ("--api-key-file",),
    "--ssl-certfile": ("--tls-cert",),
    "--ssl-keyfile": ("--tls-key",),
    "--dtype": ("--dtype",),
    "--tensor-parallel-size": ("--tp",),
    "--max-model-len": ("--max-kv-len",),
    "--max-num-seqs": ("--max-batch-size",),
    "--max-num-batched-tokens": ("--chunk",),
    "--gpu-memory-utilization": ("--gpu-memory-share",),
    "--kv-cache-memory-bytes": ("--kv-bytes",),
    "--kv-offloading-size": ("--host-kv-bytes",),
    "--num-gpu-blocks-override": ("--num-pages",),
    "--block-size": ("--page-size",),
    "--kv-cache-dtype": ("--kv-dtype", "--kv-scales"),
    "--attention-backend": ("--provider",),
    "--enforce-eager": ("--no-graphs",),
    "--enable-prefix-caching": ("--prefix-caching",),
    "--no-enable-prefix-caching": ("--no-prefix-caching",),
    "--speculative-config": ("--speculative", "--draft-tokens", "--topk"),
    "--max-logprobs": ("--max-logprobs",),
    "--chat-template": ("--chat-template",),
    "--trust-request-chat-template": ("--trust-request-chat-template",),
    "--tool-call-parser": ("--tool-parser",),
    "--reasoning-parser": ("--reasoning-parser",),
    "--generation-config": ("--generation-config",),
    "--enable-log-requests": ("--access-log",),
    "--otlp-traces-endpoint": ("--traces",),
}

# Flags that have no other name here -> why.
WITHOUT = {
    "--trust-remote-code": "no code of a model's folder is ever run",
    "--quantization": "a .gguf file brings its own; other quantised weights are not served",
    "--data-parallel-size": "start several servers and a gateway that shares requests among them (docs/scale.md)",
    "--pipeline-parallel-size": "layers are not divided among GPUs; use --tp",
    "--enable-lora": "adapters are not served; merge them into the weights",
    "--cpu-offload-gb": "weights stay on the GPU",
    "--limit-mm-per-prompt": "only the text part of a model is served",
}
