"""Names of the distributions of Triton and this project, without imports: `rocm-attn doctor` may find torch broken."""

from importlib import metadata

# Distributions that all install a package called triton; torch for ROCm brings one with "rocm" in its name.
TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-nightly")

# This project's, the library first.
OWN_DISTRIBUTIONS = ("rocm-attn", "rocm-serve", "rocm-lab")


# Parts of the checkout that the distribution of a folder imports.
_BELOW = {".": "", "rocm_serve": ". ", "rocm_lab": ". ./rocm_serve "}


def installing(folder: str, extra: str = "") -> str:
    """Says how to install a distribution of this project, from a checkout, as the project is on no package index.

    folder: that of its pyproject.toml, "." or such as rocm_serve
    """
    place = folder if folder == "." else f"./{folder}"
    what = f"'{place}[{extra}]'" if extra else place
    return f"run in a checkout of rocm_attn: pip install {_BELOW[folder]}{what}"


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def version_of_package(package: str) -> str:
    """The version of one of this project's packages; "0+unknown" in a checkout that is on the path uninstalled."""
    return version_of(package.replace("_", "-")) or "0+unknown"


def versions_line() -> str:
    """The versions of this project's distributions that are installed, in one line."""
    library, *others = OWN_DISTRIBUTIONS
    installed = ((name, version_of(name)) for name in others)
    return ", ".join(
        [f"{library} {version_of_package(library)}", *(f"{name} {version}" for name, version in installed if version)]
    )
