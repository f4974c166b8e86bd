//! TensorBoard, Parquet, JSON and HTML: what a run leaves.
