"""LoRA's adapters: low-rank factors next to frozen matrices. README.md follows a factor."""
