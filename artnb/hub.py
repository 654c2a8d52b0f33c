"""Push an exported folder to the Hugging Face hub, with a model card. huggingface_hub does it; no token is kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .errors import ConfigError, ServiceError
from .exported import EXPORT_FILE, Exported

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
NOT_PUSHED = [EXPORT_FILE, ".*"]
"""What stays here: where on this disk the export came from is nobody else's business."""


def check_repo_id(repo_id: str) -> str:
    """`repo_id` if it can be a repository's, else ConfigError."""
    if not isinstance(repo_id, str) or not _REPO.fullmatch(repo_id) or ".." in repo_id or "--" in repo_id:
        raise ConfigError(f"repo_id={repo_id!r} must be owner/name, of letters, digits, '.', '_' and '-'")
    return repo_id


def push_folder(
    exported: Exported,
    repo_id: str,
    *,
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Make the repository if need be, write a model card where there is none, and upload the folder; returns its URL.

    `token=None`: what `hf auth login` or HF_TOKEN gave. Raises: ConfigError; ServiceError with the hub's answer.
    """
    check_repo_id(repo_id)
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    except ImportError as error:
        raise ConfigError(f'push_to_hub needs {error.name}: pip install "artnb[local]"') from error
    any_http_error: Any = HfHubHTTPError.__bases__[0]  # of whichever HTTP library it is built on
    api = HfApi(token=token, library_name="artnb")
    card = exported.path / "README.md"
    if not card.exists():
        card.write_text(model_card(exported, repo_id), encoding="utf-8")
    message = commit_message or f"Upload {exported.name}" + ("" if exported.step is None else f", step {exported.step}")
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo_id,
            folder_path=exported.path,
            commit_message=message,
            revision=revision,
            ignore_patterns=NOT_PUSHED,
        )
    except OfflineModeIsEnabled as error:
        raise ServiceError("push_to_hub: HF_HUB_OFFLINE is set; unset it and start the kernel anew to push") from error
    except HfHubHTTPError as error:
        raise _refused(repo_id, error) from error
    except (OSError, any_http_error) as error:
        raise ServiceError(f"push_to_hub: the hub could not be reached: {error}") from error
    return str(done.commit_url).rpartition("/commit/")[0]


def model_card(exported: Exported, repo_id: str) -> str:
    """A model card: metadata that the hub reads, what the model is, and the line that serves it."""
    from huggingface_hub import ModelCardData

    public = not Path(exported.base_model).expanduser().exists()
    adapter = exported.format == "adapter"
    fields: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["artnb", *(["lora"] if adapter else [])],
    }
    if public:
        fields["base_model"] = exported.base_model
        fields["base_model_relation"] = "adapter" if adapter else "finetune"
    what = "A LoRA adapter" if adapter else "A fine-tuned model"
    base = f" of [{exported.base_model}](https://huggingface.co/{exported.base_model})" if public else ""
    at = "" if exported.step is None else f", checkpoint {exported.step}"
    served = f"\n```bash\n{exported.vllm.replace(str(exported.path), repo_id)}\n```\n" if public or not adapter else ""
    return (
        f"---\n{ModelCardData(**fields).to_yaml()}\n---\n\n# {repo_id.partition('/')[2]}\n\n"
        f"{what}{base}, trained with [artnb](https://github.com/artnb/artnb){at}.\n{served}"
    )


def _refused(repo_id: str, error: Any) -> ServiceError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    told = str(getattr(error, "server_message", None) or error).strip().splitlines()
    hint = {
        401: "; log in with `hf auth login`, or pass token=<a token that may write>",
        403: "; the token may not write there: check its permissions and the owner's name",
        404: "; check the owner's name",
    }.get(status or 0, "")
    said = told[0] if told else type(error).__name__
    return ServiceError(f"push_to_hub: the hub refused {repo_id} ({status}): {said}{hint}", status=status)
