"""Names of the distributions of Triton and this project, without imports: `rocm-attn doctor` may find torch broken."""

# Distributions that all install a package called triton; torch for ROCm brings one with "rocm" in its name.
TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-nightly")


def installing(folder: str, extra: str = "") -> str:
    """Says how to install a distribution of this project, from a checkout, as the project is on no package index.

    folder: that of its pyproject.toml, "." or such as rocm_serve
    """
    place = folder if folder == "." else f"./{folder}"
    what = f"'{place}[{extra}]'" if extra else place
    return f"run in a checkout of rocm_attn: pip install {what if folder == '.' else f'. {what}'}"
