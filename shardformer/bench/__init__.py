"""What is measured, and the references that it is measured against."""
