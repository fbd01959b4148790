"""One file per mesh axis: collectives on arrays. Nothing here knows a model."""
