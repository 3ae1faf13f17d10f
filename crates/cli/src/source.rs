//! What a path on the command line is.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use moe_lora_checkpoint::{Checkpoint, Manifest};
use moe_lora_files::{JsonFile, TensorFile};
use moe_lora_interchange::{HubModel, ModelConfig, PeftAdapter};

const ADAPTER_CONFIG: &str = "adapter_config.json";
const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// A folder or file of a known kind, not opened yet.
pub enum Source {
    /// A folder with a manifest.
    Checkpoint(PathBuf),
    /// A folder with an adapter's configuration.
    Peft(PathBuf),
    /// A folder with a model's configuration.
    Model(PathBuf),
    /// A safetensors file.
    File(PathBuf),
}

impl Source {
    /// Tells what lies at a path by the files there.
    ///
    /// # Errors
    /// Nothing that is known lies there.
    pub fn find(path: &Path) -> Result<Self> {
        let has = |name: &str| path.join(name).is_file();
        let path = path.to_owned();
        if path.is_file() {
            Ok(Self::File(path))
        } else if Manifest::path(&path).is_file() {
            Ok(Self::Checkpoint(path))
        } else if has(ADAPTER_CONFIG) {
            Ok(Self::Peft(path))
        } else if has("config.json") {
            Ok(Self::Model(path))
        } else {
            bail!(
                "nothing to read at '{}' (give a checkpoint with a manifest.json, an adapter with an \
                 {ADAPTER_CONFIG}, a model with a config.json, or a safetensors file)",
                path.display()
            )
        }
    }
}

/// The weights of a PEFT folder as they lie on disk.
///
/// # Errors
/// They cannot be opened.
pub fn adapter_file(folder: &Path) -> Result<TensorFile> {
    Ok(TensorFile::open(folder.join(ADAPTER_WEIGHTS))?)
}

/// The configuration of an adapter's base model: of the folder given, or of the one that the adapter names.
///
/// # Errors
/// No folder was given and the adapter names none that is here.
pub fn base_config(adapter: &Path, model: Option<&Path>) -> Result<ModelConfig> {
    if let Some(model) = model {
        return Ok(ModelConfig::read(model)?);
    }
    let config = JsonFile::read(adapter.join(ADAPTER_CONFIG))?;
    let named: Option<String> = config.get("base_model_name_or_path")?;
    let folder = named
        .map(PathBuf::from)
        .filter(|folder| folder.join("config.json").is_file());
    match folder {
        Some(folder) => Ok(ModelConfig::read(&folder)?),
        None => bail!(
            "'{}' names no base model that is a folder here (give it with --model)",
            adapter.display()
        ),
    }
}

/// Refuses a folder that holds a checkpoint, which would be replaced.
///
/// # Errors
/// It does.
pub fn expect_no_checkpoint(folder: &Path) -> Result<()> {
    match Manifest::path(folder).exists() {
        false => Ok(()),
        true => bail!(
            "'{}' holds a checkpoint already (choose another folder, or remove it)",
            folder.display()
        ),
    }
}

/// Refuses what is no adapter.
///
/// # Errors
/// A model or a file lies there.
pub fn expect_adapter(path: &Path, source: &Source) -> Result<()> {
    match source {
        Source::Checkpoint(_) | Source::Peft(_) => Ok(()),
        Source::Model(_) | Source::File(_) => bail!(
            "'{}' is no adapter (give a folder with a manifest.json or an {ADAPTER_CONFIG})",
            path.display()
        ),
    }
}

/// The adapter of a checkpoint or a PEFT folder, for a model of `config`; factors that the experts share are expanded.
///
/// # Errors
/// Something else lies there, or it does not fit the model.
pub fn read_adapter(path: &Path, config: &ModelConfig) -> Result<PeftAdapter> {
    let source = Source::find(path)?;
    expect_adapter(path, &source)?;
    match source {
        Source::Checkpoint(folder) => {
            let checkpoint = Checkpoint::open(&folder)?;
            let adapter = PeftAdapter::from_checkpoint(&checkpoint)?;
            Ok(adapter.expand(config.num_experts)?)
        }
        Source::Peft(folder) => {
            let adapter = PeftAdapter::read(&folder, config)?;
            Ok(adapter.expand(config.num_experts)?)
        }
        Source::Model(_) | Source::File(_) => unreachable!("refused above"),
    }
}

/// The model in a folder.
///
/// # Errors
/// It cannot be opened.
pub fn open_model(folder: &Path) -> Result<HubModel> {
    HubModel::open(folder).with_context(|| format!("model '{}'", folder.display()))
}

/// Opens a checkpoint.
///
/// # Errors
/// It is damaged, or something else lies there.
pub fn open_checkpoint(folder: &Path) -> Result<Checkpoint> {
    match Source::find(folder)? {
        Source::Checkpoint(folder) => Ok(Checkpoint::open(&folder)?),
        _ => bail!(
            "'{}' is no checkpoint, having no manifest.json (turn PEFT files into one with `moe-lora import`)",
            folder.display()
        ),
    }
}
