"""Tests for the first owner of an MI300: run `bash scripts/test.sh rocm` and send its report. See docs/rocm.md."""
