"""Load the splits that `train_bapo.py` trains and evaluates on."""

from pathlib import Path

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError


_FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_DATA_SUFFIXES = (*_FILE_BUILDERS, ".csv", ".tsv", ".txt", ".arrow")


def load_splits(name: str, config: str | None = None, streaming: bool = False) -> DatasetDict | IterableDatasetDict:
    """
    Load a dataset from a file, a folder or the Hub.

    Args:
        name (`str`):
            A `.json`, `.jsonl` or `.parquet` file (its rows are the split `"train"`), a folder written by
            `save_to_disk`, a folder of data files, or an id on the Hub.
        config (`str`, *optional*):
            Configuration name, for Hub ids and folders of data files.
        streaming (`bool`, *optional*, defaults to `False`):
            Whether to stream files and Hub datasets.

    Returns:
        Splits by name.

    Raises:
        ValueError: If there is no such file or folder, or the Hub does not give the dataset.
    """
    path = Path(name)
    if path.is_file():
        if path.suffix not in _FILE_BUILDERS:
            raise ValueError(
                f"`dataset_name` is the file '{name}': expected one of {', '.join(_FILE_BUILDERS)}, or a folder."
            )
        return load_dataset(_FILE_BUILDERS[path.suffix], data_files={"train": name}, streaming=streaming)
    if path.is_dir() and ((path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()):
        loaded = load_from_disk(name)
        return DatasetDict(train=loaded) if isinstance(loaded, Dataset) else loaded
    if not path.is_dir() and (path.is_absolute() or name.startswith(".") or path.suffix in _DATA_SUFFIXES):
        raise ValueError(
            f"`dataset_name` is '{name}', but there is no such file or folder: correct the path, or give an id on the "
            "Hub such as 'org/dataset'."
        )
    try:
        return load_dataset(name, name=config, streaming=streaming)
    except (OSError, DatasetsError) as error:
        raise ValueError(
            f"`dataset_name` is '{name}', which is neither a file nor a folder here, and the Hub did not give it "
            f"either: {error}"
        ) from error


def pick_split(splits: DatasetDict | IterableDatasetDict, split: str, parameter: str) -> Dataset | IterableDataset:
    """
    Return one split.

    Args:
        splits (`DatasetDict` or `IterableDatasetDict`):
            Splits by name.
        split (`str`):
            Name of the split.
        parameter (`str`):
            Parameter that holds `split`, for the error message.

    Raises:
        ValueError: If there is no such split, naming those there are.
    """
    if split not in splits:
        raise ValueError(
            f"`{parameter}` is '{split}', but the dataset has only the splits {sorted(splits)}: set `{parameter}` to "
            "one of them."
        )
    return splits[split]
