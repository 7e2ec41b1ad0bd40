"""The judge: two Stacks in, one Verdict out."""
