"""Imported by create_finetune_tfrecords.py, and used only where a flag asks for it."""
