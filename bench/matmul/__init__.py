"""Products of few rows with plain, FP8 and MXFP4 weights."""
