"""What installs Triton: names alone, as `rocm-attn doctor` reads them where torch may be broken."""

# Distributions that all install a package called triton; torch for ROCm brings one with "rocm" in its name.
TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-nightly")
