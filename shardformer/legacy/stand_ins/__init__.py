"""What runs in place of packages that scripts import and that are not installed; missing_packages says which."""
