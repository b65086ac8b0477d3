"""A transformer of 12 layers, trained in float32, bfloat16 and float16."""
