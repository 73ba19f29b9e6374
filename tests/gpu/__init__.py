"""These tests compare a GPU with a CPU (`make test-gpu`). Where there is no GPU, they try themselves out on the CPU."""
