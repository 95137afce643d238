"""The same optimizer step done by tierstore and by what people use instead, each in a process of its own."""
