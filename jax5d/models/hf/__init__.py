"""Hugging Face's weights and config.json, of `GPT2LMHeadModel` and `LlamaForCausalLM`, in and out.

```
state, model = hf.read(folder), hf.read_config(folder)
params = hf.from_state_dict(state, model)
state = trainer.begin(on_mesh(params, trainer.shapes.params, trainer.shardings.params))
hf.write(other_folder, state.params, model)
```
"""

from jax5d.models.hf.config import config_json, model_config
from jax5d.models.hf.files import read, read_config, write
from jax5d.models.hf.names import from_state_dict, to_state_dict

__all__ = ["config_json", "from_state_dict", "model_config", "read", "read_config", "to_state_dict", "write"]
