"""One model on many devices: mesh, tensor-parallel layers, pipeline stages, engines."""
