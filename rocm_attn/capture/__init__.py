"""Steps as captured HIP or CUDA graphs: which are captured, their memory, and how they are checked and replayed."""
