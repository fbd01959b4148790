"""What a step does cost, read from the program."""
