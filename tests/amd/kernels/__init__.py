"""Every Triton kernel on a GPU, or under Triton's interpreter (float32 and float16 only: its bf16 is wrong)."""
