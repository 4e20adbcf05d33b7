// Found first where an object is linked to the emulation and to NVIDIA's backend.
#error "list this test in gpu_runtime_files (tests/gpu/files.cmake): it includes CUDA"
