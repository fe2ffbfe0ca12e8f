"""What there is for CUDA so far: a probe of the devices. Nothing computes there yet."""
