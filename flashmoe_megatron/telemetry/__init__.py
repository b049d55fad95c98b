"""What happens inside the kernel, as records, metrics and their reduction over ranks."""
