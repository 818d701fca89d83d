"""Tool calls in the text of a model's answer, in the published formats."""
