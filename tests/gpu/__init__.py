"""What a GPU computes, beside a CPU: `make test-gpu`. Where there is no GPU, the tests try themselves out on the CPU."""
