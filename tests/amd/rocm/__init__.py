"""What the first owner of an MI300 runs: `bash scripts/test.sh rocm`, with a report to send. See docs/rocm.md."""
