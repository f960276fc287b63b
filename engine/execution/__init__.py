"""Execution of step plans on one or more ranks: model runner, input buffers, CUDA graphs, worker processes."""
