"""Names of the distributions of Triton and this project, without imports: `rocm-attn doctor` may find torch broken."""

# Distributions that all install a package called triton; torch for ROCm brings one with "rocm" in its name.
TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-nightly")


def installing(extra: str) -> str:
    """Says how to install an extra of this project: from a checkout, because the project is on no package index."""
    return f"run in a checkout of rocm_attn: pip install '.[{extra}]'"
