"""LoRA adapters by name on one frozen base: add, load, save, drop, and which of them the forward pass uses.

Names are free text; PEFT's own names cannot hold a dot, so each name gets a key. Does not train.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.numpy import save_file
from safetensors.torch import load_file

from ..config import LoraConfig
from ..errors import CheckpointError, ConfigError, ModelError, nearest
from .base_model import BaseModel
from .lora_forward import PlainLoraLinear, RoundedAdapter, use_plain_lora

_PLACEHOLDER = "placeholder"
"""PEFT cannot wrap a model without an adapter; this one has rank 1 and is never used."""


class Adapters:
    """The adapters of one base model. `model` is the PEFT-wrapped model, `lock` guards the weights and what is active.

    Adapter weights are fp32 whatever the base's dtype is.
    """

    def __init__(self, base: BaseModel, lora: LoraConfig) -> None:
        self.lora = lora
        self.lock = threading.RLock()
        self._base = base
        self._keys: dict[str, str] = {}
        self._fresh = itertools.count()
        self._weights: dict[str, dict[str, torch.nn.Parameter]] = {}  # of each adapter, by name in the model
        self._active: tuple[str | None, bool] = (None, False)  # adapter, trained?
        self._depth = 0
        self._rounded: RoundedAdapter | None = None
        self._rounded_of: tuple[object, bool] = (None, False)  # the weights that it is of; static?
        self._rounding = False  # whether passes use it
        placeholder = self._peft_config(LoraConfig(r=1, alpha=1.0, target_modules=lora.target_modules))
        with _kept_rng(base.device), warnings.catch_warnings():
            # peft 0.21 asks transformers 5.24 by a deprecated name; goes when peft asks by the new one.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
            try:
                self.model: peft.PeftModel = peft.get_peft_model(base.model, placeholder, adapter_name=_PLACEHOLDER)
            except ValueError as error:
                raise ConfigError(f"LoraConfig: target_modules={lora.target_modules!r}: {error}") from error
        self.model.eval()
        self.model.requires_grad_(False)
        self._layers = self._tuned()
        self._switch(None)

    def _tuned(self) -> list[Any]:
        layers = [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]
        for layer in layers:
            use_plain_lora(layer)
        return layers

    def names(self) -> list[str]:
        """The adapters, in the order in which they came."""
        return list(self._keys)

    def key(self, name: str) -> str:
        """PEFT's own name of an adapter. Raises: ModelError when there is none."""
        try:
            return self._keys[name]
        except KeyError:
            known = nearest(name, self._keys) if self._keys else "; there is no adapter yet"
            raise ModelError(f"no adapter {name!r} is loaded{known}") from None

    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """The adapter's weights by their name in the model, in a fixed order."""
        self.key(name)
        return dict(self._weights[name])

    def add(self, name: str, lora: LoraConfig | None = None) -> None:
        """Add an untouched adapter: A drawn from `lora.seed`, B zero, so the model answers as its base does.

        Raises: ModelError when the name is taken.
        """
        lora = lora or self.lora
        with self.lock:
            if name in self._keys:
                raise ModelError(f"an adapter {name!r} is already loaded; drop_adapter({name!r}) forgets it")
            self._add(name, self._peft_config(lora))
            generator = torch.Generator().manual_seed(lora.seed)
            with torch.no_grad():
                for parameter_name, weight in self.parameters(name).items():
                    if ".lora_A." in parameter_name:  # PEFT's own distribution, from a generator of our own
                        start = torch.empty(weight.shape)
                        torch.nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
                        weight.copy_(start)
                    else:
                        weight.zero_()

    def load(self, name: str, path: Path) -> None:
        """Load a PEFT adapter folder under `name`, in place of what has that name.

        Raises: CheckpointError when the folder is not a LoRA adapter of this base.
        """
        config, weights = _read(path)
        with self.lock:
            if name in self._keys and not _same_shape(self.model.peft_config[self._keys[name]], config):
                self.drop(name)
            fresh = name not in self._keys
            if fresh:
                self._add(name, config)
            key = self._keys[name]
            problem = self._fill(key, weights)
            if problem:
                if fresh:
                    self.drop(name)
                raise CheckpointError(f"{path} does not fit {self._base.name}: {problem}")

    def _fill(self, key: str, weights: dict[str, torch.Tensor]) -> str | None:
        held = peft.get_peft_model_state_dict(self.model, adapter_name=key, save_embedding_layers=False)
        if held.keys() != weights.keys():
            return (
                f"it lacks {len(held.keys() - weights.keys())} weights and has {len(weights.keys() - held.keys())} more"
            )
        wrong = [n for n, w in weights.items() if w.shape != held[n].shape]
        if wrong:
            return f"{wrong[0]} has shape {tuple(weights[wrong[0]].shape)}, not {tuple(held[wrong[0]].shape)}"
        with torch.no_grad():
            peft.set_peft_model_state_dict(self.model, weights, adapter_name=key)
        return None

    def save(self, name: str, path: Path) -> None:
        """Write a PEFT adapter folder: adapter_model.safetensors and adapter_config.json. Not atomic by itself."""
        key = self.key(name)
        path.mkdir(parents=True, exist_ok=True)
        with self.lock:
            # As PEFT names them in a file: without the adapter's own name. Its function for this walks all modules.
            held = {n.replace(f".{key}.", "."): w.detach() for n, w in self._weights[name].items()}
            flat = torch.cat([w.reshape(-1) for w in held.values()]).to("cpu", torch.float32).numpy()
            pieces = np.split(flat, np.cumsum([w.numel() for w in held.values()])[:-1])
            weights = {n: piece.reshape(tuple(w.shape)) for (n, w), piece in zip(held.items(), pieces, strict=True)}
            config = copy.copy(self.model.peft_config[key])
            config.inference_mode = True
            config.base_model_name_or_path = self._base.name
            save_file(weights, path / "adapter_model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(str(path))

    def drop(self, name: str) -> None:
        """Forget an adapter. Unknown names are ignored."""
        with self.lock:
            key = self._keys.pop(name, None)
            if key is None:
                return
            if self._rounded_of[0] is self._weights.pop(name):
                self._rounded, self._rounded_of = None, (None, False)
            before, self._active = self._active, (None, False)
            self._switch(None)
            self.model.delete_adapter(key)
            if before[0] != name:
                self._activate(*before)

    @contextmanager
    def use(self, name: str | None, *, train: bool = False) -> Iterator[None]:
        """Forward passes in this block use the adapter (None: the base alone). Holds `lock`.

        `train=True` gives its weights `requires_grad`. Blocks nest; after the outermost one its adapter
        stays active, because switching walks all layers and the next user is most often the same.
        """
        with self.lock:
            if name is not None:
                self.key(name)  # an unknown name fails before anything changes
            before = self._active
            self._depth += 1
            try:
                self._activate(name, train)
                yield
            finally:
                self._depth -= 1
                # A weight that still required a gradient would make the engine's passes keep their activations.
                if self._depth and (before[0] is None or before[0] in self._keys):
                    self._activate(*before)
                elif train:
                    self._activate(name if name in self._keys else None, False)
                if not self._depth:
                    self.unround()

    def round(self, *, static: bool = False) -> None:
        """Passes use the active adapter's weights in the model's dtype, as they are now. See lora_forward.py."""
        name, _ = self._active
        if name is None or self._base.dtype == torch.float32:
            return
        of, static_before = self._rounded_of
        if self._rounded is None or of is not self._weights[name] or static is not static_before:
            self.unround()
            self._rounded_of = (self._weights[name], static)
            self._rounded = RoundedAdapter(self._layers, self._base.dtype, static=static)
        self._rounded.use()
        self._rounding = True

    def unround(self) -> None:
        """Each pass rounds the weights itself again."""
        if self._rounding and self._rounded is not None:
            self._rounded.release()
        self._rounding = False

    def _activate(self, name: str | None, train: bool) -> None:
        if self._active == (name, train):
            return
        before, was_trained = self._active
        if was_trained and before in self._weights:
            for weight in self._weights[before].values():
                weight.requires_grad_(False)
        self._active = (name, train)
        if name != before:
            self._switch(name)
        if train and name is not None:
            for weight in self._weights[name].values():
                weight.requires_grad_(True)

    def _switch(self, name: str | None) -> None:
        """What PEFT's `set_adapter` and `enable_adapters` set in its layers, less their walk over all weights.

        That walk takes 15 ms for 30 layers, as long as a decoding step of a small model. The two names are private; a
        PEFT without them fails the tests of `use`.
        """
        active = [_PLACEHOLDER if name is None else self._keys[name]]
        self._rounding = False
        for layer in self._layers:
            layer._disable_adapters = name is None
            layer._active_adapter = active
            if isinstance(layer, PlainLoraLinear):
                layer.activate()

    def _add(self, name: str, config: Any) -> None:
        key = f"adapter{next(self._fresh)}"
        with _kept_rng(self._base.device):
            try:
                self.model.add_adapter(key, config)
            except ValueError as error:
                raise ConfigError(f"LoraConfig: target_modules={config.target_modules!r}: {error}") from error
        self._keys[name] = key
        self._layers = self._tuned()
        self.model.eval()
        self._weights[name] = {n: p for n, p in sorted(self.model.named_parameters()) if f".{key}." in n}
        for weight in self._weights[name].values():
            weight.requires_grad_(False)
        before, self._active = self._active, (None, False)
        self._switch(None)  # layers that are new, and what PEFT made active
        self._activate(*before)

    def _peft_config(self, lora: LoraConfig) -> peft.LoraConfig:
        targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
        return peft.LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # declared int, used as a factor
            target_modules=targets,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=self._base.name,
        )


@contextmanager
def _kept_rng(device: torch.device) -> Iterator[None]:
    """PEFT draws its first weights from torch's global generators; what the user seeded there stays as it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _read(path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (path / file).is_file():
            raise CheckpointError(f"{path} is not a complete PEFT adapter folder: it has no {file}")
    try:
        config = peft.PeftConfig.from_pretrained(str(path))
        weights = load_file(path / "adapter_model.safetensors")
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a PEFT adapter: {error}") from error
    if config.peft_type != peft.PeftType.LORA:
        raise CheckpointError(f"{path} is a {config.peft_type} adapter; only LoRA adapters are supported")
    return config, weights


def _same_shape(a: Any, b: Any) -> bool:
    def shape(config: Any) -> tuple[Any, ...]:
        targets = config.target_modules
        return config.r, config.lora_alpha, config.use_rslora, targets if isinstance(targets, str) else set(targets)

    return shape(a) == shape(b)
