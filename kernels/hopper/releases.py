"""The releases of Triton that the kernels in this folder are for. Importing this imports no Triton."""

# Releases of Gluon, in which the kernels are written, change. These have passed their tests.
TRITONS = ("3.6.0",)
