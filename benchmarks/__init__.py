"""The library beside other ways of training the same model. Each script is run from the repository root."""
