"""Steps as graphs: which are captured, the memory they take, and how they are checked and replayed."""
