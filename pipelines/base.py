"""What every method's pipeline shares: inputs, seeds, loading, decoding, pictures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from ..decoding.loop import decode
from ..decoding.noise import Noise
from ..decoding.planner import Planner
from ..decoding.sampling import Sampling
from ..decoding.sequence import Sequence
from ..decoding.trace import Recorder
from ..decoding.types import Drafter, Verifier
from ..models import loading
from ..models.target import Conditioning, DiscreteTarget, visible, visible_count
from .options import MethodConfig, unknown_option
from .output import SpeculativeOutput

Callback = Callable[[Any, int, int, dict[str, Any]], dict[str, Any] | None]


@dataclass
class Run:
    """Everything a method needs to set up one call. size: codes of the picture; grid: its lattice of image tokens."""

    config: Any
    sampling: Sampling
    conditioning: Conditioning
    grid: tuple[int, int]
    prompts: list[str]
    negative: list[str] | None
    device: torch.device
    dtype: torch.dtype
    size: tuple[int, int]


@dataclass
class Method:
    """A configured method: who drafts, who verifies. measurable False: the relaxation's cost cannot be measured."""

    drafter: Drafter
    verifier: Verifier
    measurable: bool = True


class SpeculativeDecodingPipeline(DiffusionPipeline):
    """Base class of every method. Subclasses name their `config_class` and implement `scratch` and `method`.

    Args:
        target: the autoregressive model (p).
        codec: tokens <-> pixels.
        tokenizer: prompts -> ids.
        defaults: the family's sampling defaults: guidance_scale, temperature, top_k, top_p, grids, window.
        text_encoder: for families that read text through one; None for the others.
    """

    config_class: ClassVar[type[MethodConfig]]
    model_cpu_offload_seq = "text_encoder->target->codec"
    # Target and draft take turns every round, so that the small one stays where it runs.
    _exclude_from_cpu_offload: ClassVar[list[str]] = ["draft_model", "draft_head"]
    _optional_components: ClassVar[list[str]] = ["text_encoder"]
    _callback_tensor_inputs: ClassVar[list[str]] = ["tokens", "length", "counts"]

    def __init__(
        self,
        target: DiscreteTarget,
        codec: Any,
        tokenizer: Any,
        defaults: dict[str, Any] | None = None,
        text_encoder: Any = None,
    ):
        super().__init__()
        if codec.config.vocab_size != target.vocab_size:
            raise ValueError(
                f"the codec has {codec.config.vocab_size} codes and the target {target.vocab_size}: "
                "they must share one codebook, load a codec made for this target"
            )
        self.register_modules(target=target, codec=codec, tokenizer=tokenizer, text_encoder=text_encoder)
        self.register_to_config(defaults=defaults or {})
        self.image_processor = VaeImageProcessor(vae_scale_factor=codec.config.downsample)
        self._interrupt = False
        self._planners: dict[Any, Planner] = {}

    # -- loading ---------------------------------------------------------------------------------------------------------

    @classmethod
    def component_names(cls) -> list[str]:
        """The components this pipeline loads: the constructor's arguments that are models."""
        return [name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "defaults")]

    @classmethod
    def required_components(cls) -> list[str]:
        """Those of `component_names` that every family must have."""
        return [name for name in cls.component_names() if name not in cls._optional_components]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> SpeculativeDecodingPipeline:
        """Load from a folder, a checkpoint or a Hub id.

        Args:
            pretrained_model_name_or_path: folder with a model_index.json (for example `foredraft.DEMO`), a transformers folder or
            an original checkpoint of a known family, a Hub id of one of these, or 'owner/name/file.pt' on the Hub.
            torch_dtype: dtype of the models (default float32).
            quantization: "int8" or "int4" rounds the target's matrices (weights only; needs torchao).
            device_map, max_memory, offload_folder: as in accelerate, for the target: "auto", or {module: device, "cpu", "disk"}.
            revision, cache_dir, token, local_files_only, force_download: as in huggingface_hub.
            target, codec, tokenizer, text_encoder, draft_model, draft_head: use these, or load them from these places. defaults:
            instead of the family's.

        Raises:
            FileNotFoundError: nothing is there, or a file is missing. ValueError: the folder is not one of ours, or a file in it
            is damaged; both say what to do.
        """
        names, optional = cls.component_names(), tuple(cls._optional_components)
        return cls(**loading.load_components(pretrained_model_name_or_path, names, cls.__name__, kwargs, optional))

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> SpeculativeDecodingPipeline:
        """Another method over the same components (shared, not copied). kwargs: components or `defaults` to use instead."""
        shared = {name: part for name, part in pipeline.components.items() if name in cls.component_names()}
        missing = [name for name in cls.required_components() if name not in {**shared, **kwargs}]
        if missing:
            raise ValueError(f"{cls.__name__} also needs {', '.join(missing)}: pass {missing[0]}=...")
        return cls(**{"defaults": pipeline.config.get("defaults"), **shared, **kwargs})

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write a folder that `from_pretrained` reads back bit for bit. kwargs go to the models' own save_pretrained."""
        loading.save_components(self, save_directory, self.component_names(), kwargs)

    # -- the method ------------------------------------------------------------------------------------------------------

    def scratch(self, config: Any, device: torch.device) -> int:
        """The largest number of draft nodes a round may feed."""
        raise TypeError(f"{type(self).__name__} does not say how many nodes it drafts")

    def method(self, run: Run) -> Method:
        """Drafter and verifier of one call."""
        raise TypeError(f"{type(self).__name__} has no method")

    def planner(self, run: Run, lengths: tuple[int, ...], start: int) -> Planner:
        """The planner of calls like this one, kept from call to call."""
        key = (run.device, run.dtype, len(run.prompts), run.sampling.guided, run.grid)
        if key not in self._planners:
            self._planners[key] = Planner(lengths, start)
        return self._planners[key]

    def family_default(self, name: str, fallback: Any) -> Any:
        """A default of the model family."""
        return (self.config.defaults or {}).get(name, fallback)

    # -- the call --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        **options: Any,
    ) -> SpeculativeOutput | tuple[Any, Tensor, Any]:
        """Draw pictures.

        Args:
            prompt: what to draw; a list draws one batch.
            negative_prompt: takes the place of the unconditional prompt; needs guidance_scale > 1.
            num_images_per_prompt: pictures per prompt; the batch is prompt-major.
            height, width: size in pixels; the family's default if None.
            guidance_scale: classifier-free guidance, >= 1; 1 runs no unconditional rows. temperature >= 0 (0 = greedy);
            top_k >= 0 (0 = all codes); top_p in (0, 1]. None: the family's default.
            generator: one generator (one seed per picture is drawn from it), or a list with one per picture.
            output_type: "pil", "np" (float [B, H, W, 3] in 0..1), "pt" ([B, 3, H, W] in 0..1) or "latent" (the codes).
            return_dict: False returns the tuple (images, tokens, traces).
            callback_on_step_end: called after every round with (pipeline, round, tokens committed in every row, dict of the
            tensors named in callback_on_step_end_tensor_inputs: "tokens" [B, N] and "length" [B] of committed tokens, "counts"
            [3, B] of target forwards, draft tokens judged and accepted so far; None: the first two); what it returns is ignored.
            Setting `pipeline._interrupt = True` in it ends the call after the round.
            **options: the method's own, see `config_class`.

        Returns:
            `SpeculativeOutput`: images, tokens [B, h, w], traces.

        Raises:
            ValueError or TypeError, before any model runs, in one sentence that says what to change.
        """
        config = self._config(options)
        sampling = self._sampling(guidance_scale, temperature, top_k, top_p)
        grid = self._grid(height, width)
        prompts, negative = self._prompts(prompt, negative_prompt, num_images_per_prompt, sampling)
        if output_type not in ("pil", "np", "pt", "latent"):
            raise ValueError(f"output_type must be pil, np, pt or latent, got {output_type!r}")
        if callback_on_step_end is not None and not callable(callback_on_step_end):
            raise TypeError(f"callback_on_step_end must be a function, got {type(callback_on_step_end).__name__}")
        wanted = callback_on_step_end_tensor_inputs or ["tokens", "length"]
        for name in wanted:
            if name not in self._callback_tensor_inputs:
                raise ValueError(f"callback_on_step_end_tensor_inputs may hold {self._callback_tensor_inputs}, got {name!r}")
        seeds = draw_seeds(generator, len(prompts)).to(self._execution_device)

        self._interrupt = False
        try:
            with torch.inference_mode():
                result = self._decode(config, sampling, grid, prompts, negative, seeds, callback_on_step_end, wanted)
                sequence, recorder, method = result
                begun = perf_counter()
                tokens = visible(sequence.tokens[:, 1:], sequence.grid, grid)
                images = tokens if output_type == "latent" else self._pictures(tokens, output_type)
                recorder.clock.parts["codec"] += perf_counter() - begun
                traces = recorder.traces(
                    sequence,
                    seeds,
                    self.config_class.name,
                    config.exact,
                    getattr(method.drafter, "draft_forwards", 0),
                    method.measurable,
                    grid,
                )
                planner = getattr(method.drafter, "planner", None)
                if isinstance(planner, Planner):
                    for trace in traces:
                        trace.notes += planner.notes
        finally:
            self._interrupt = False
            self.maybe_free_model_hooks()
        # Outside inference mode: tensors that users may put into autograd.
        tokens = tokens.clone()
        images = images.clone() if isinstance(images, Tensor) else images
        if not return_dict:
            return images, tokens, traces
        return SpeculativeOutput(images=images, tokens=tokens, traces=traces)

    def _decode(
        self,
        config: Any,
        sampling: Sampling,
        grid: tuple[int, int],
        prompts: list[str],
        negative: list[str] | None,
        seeds: Tensor,
        callback: Callback | None,
        wanted: list[str],
    ) -> tuple[Sequence, Recorder, Method]:
        device = self._execution_device
        recorder = Recorder()
        lattice = self.target.lattice(grid)
        conditioning = self.target.encode(self.components, prompts, negative, sampling.guided, grid)
        run = Run(config, sampling, conditioning, lattice, prompts, negative, device, conditioning.start.dtype, grid)
        sequence = self.target.begin(conditioning, lattice, sampling, self.scratch(config, device))
        method = self.method(run)
        planner = getattr(method.drafter, "planner", None)

        def on_round(sequence: Sequence, recorder: Recorder) -> bool:
            bar.update(sequence.low - 1 - bar.n)
            if callback is not None:
                begun = perf_counter()
                made = {
                    "tokens": lambda: visible(sequence.tokens[:, 1:], lattice, grid).flatten(1),
                    "length": lambda: visible_count(sequence.length - 1, lattice, grid),
                    "counts": recorder.counts,
                }
                done = int(visible_count(torch.tensor(sequence.low - 1), lattice, grid))
                callback(self, recorder.rounds - 1, done, {name: made[name]() for name in wanted})
                spent = perf_counter() - begun
                recorder.clock.callback(spent)
                if isinstance(planner, Planner):
                    planner.skip(spent)
            return self._interrupt

        with self.progress_bar(total=sequence.limit - 1) as bar:
            decode(self.target, method.drafter, method.verifier, sequence, Noise(seeds), recorder, on_round)
        recorder.refuse_nan(type(self.target).__name__, self.target.dtype)
        return sequence, recorder, method

    def _pictures(self, tokens: Tensor, output_type: str) -> Any:
        pixels = self.codec.decode(tokens)
        return self.image_processor.postprocess(pixels.float(), output_type=output_type)

    @property
    def interrupt(self) -> bool:
        """Set `_interrupt` to end the running call after its current round."""
        return self._interrupt

    # -- inputs ----------------------------------------------------------------------------------------------------------

    def _config(self, options: dict[str, Any]) -> MethodConfig:
        names = [name for name in inspect.signature(self.__call__).parameters if name != "options"]
        try:
            return self.config_class.from_options(options)
        except TypeError as error:
            bad = next((name for name in options if name not in self.config_class.__dataclass_fields__), None)
            if bad is None:
                raise
            message = unknown_option(bad, [*self.config_class.__dataclass_fields__, *names], self.config_class.title)
            raise TypeError(message) from error

    def _sampling(
        self, guidance_scale: float | None, temperature: float | None, top_k: int | None, top_p: float | None
    ) -> Sampling:
        given = {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        for name, fallback in (("guidance_scale", 1.0), ("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
            values.setdefault(name, self.family_default(name, fallback))
        return Sampling(**values)

    def _grid(self, height: int | None, width: int | None) -> tuple[int, int]:
        cell = self.codec.config.downsample
        grids = [tuple(grid) for grid in self.family_default("grids", [])]
        first = grids[0] if grids else (16, 16)
        size = (first[0] * cell if height is None else height, first[1] * cell if width is None else width)
        if not all(isinstance(length, int) and not isinstance(length, bool) for length in size):
            raise TypeError(f"height and width must be whole numbers of pixels, got {size[0]!r} x {size[1]!r}")
        if size[0] <= 0 or size[1] <= 0 or size[0] % cell or size[1] % cell:
            raise ValueError(f"height and width must be positive multiples of {cell} pixels, got {size[0]} x {size[1]}")
        grid = (size[0] // cell, size[1] // cell)
        if grids and grid not in grids:
            near = sorted(grids, key=lambda other: abs(other[0] - grid[0]) + abs(other[1] - grid[1]))[:6]
            sizes = ", ".join(f"{h * cell} x {w * cell}" for h, w in (grids if len(grids) <= 6 else near))
            which = sizes if len(grids) <= 6 else f"{len(grids)} sizes, nearest are {sizes}"
            raise ValueError(f"this model draws {which} pixels (height x width), got {size[0]} x {size[1]}")
        return grid

    def _prompts(self, prompt: Any, negative: Any, count: int, sampling: Sampling) -> tuple[list[str], list[str] | None]:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"num_images_per_prompt must be a whole number of at least 1, got {count!r}")
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(prompts, list) or not all(isinstance(text, str) for text in prompts):
            raise TypeError(f"prompt must be a string or a list of strings, got {type(prompt).__name__}")
        if not prompts:
            raise ValueError("the list of prompts is empty: give at least one")
        negatives: list[str] | None = None
        if negative is not None:
            if not sampling.guided:
                raise ValueError("a negative prompt needs guidance_scale above 1")
            negatives = [negative] * len(prompts) if isinstance(negative, str) else negative
            if not isinstance(negatives, list) or not all(isinstance(text, str) for text in negatives):
                raise TypeError(f"negative_prompt must be a string or a list of strings, got {type(negative).__name__}")
            if len(negatives) != len(prompts):
                raise ValueError(
                    f"{len(negatives)} negative prompts were given for {len(prompts)} prompts: give one, or one each"
                )
            negatives = [text for text in negatives for _ in range(count)]
        return [text for text in prompts for _ in range(count)], negatives


def draw_seeds(generator: torch.Generator | list[torch.Generator] | None, count: int) -> Tensor:
    """One 63-bit seed per picture: int64 [count]. One generator yields them all in order, a list yields one each."""
    top = 2**63 - 1
    if isinstance(generator, list | tuple):
        if len(generator) != count:
            raise ValueError(f"{len(generator)} generators were given for {count} pictures: give one, or one each")
        for item in generator:
            if not isinstance(item, torch.Generator):
                raise TypeError(f"generator must be a torch.Generator or a list of them, got a list with {type(item).__name__}")
        each = [torch.randint(top, (1,), generator=item, device=item.device).cpu() for item in generator]
        return torch.cat(each)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or a list of them, got {type(generator).__name__}")
    device = generator.device if generator is not None else "cpu"
    return torch.randint(top, (count,), generator=generator, device=device).cpu()
