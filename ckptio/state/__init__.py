"""From a nesting of values to a list of tensors and a tree, and back."""
