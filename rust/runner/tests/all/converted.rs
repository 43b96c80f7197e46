//! Converted models: the same bits as the original, the use of memory, damage, refusals.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use penstock_checkpoint::{Checkpoint, Conversion, ConvertedWriter, FusedMatrix, NewTensor};
use penstock_runner::{Host, LaunchError, convert, logits};
use penstock_types::{
    Activations, Auto, CodeBits, Dtype, EngineConfig, Grid, Minimum, ScaleFormat, WeightFormat, WeightType,
};

use crate::common::TinyModel;

/// A temporary directory that is removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("penstock-converted-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn config(quantization: Option<WeightType>) -> EngineConfig {
    EngineConfig {
        threads: Some(2),
        quantization: Auto(quantization).into(),
        prefix_cache: false,
        ..EngineConfig::default()
    }
}

fn write(model: &TinyModel, quantization: Option<WeightType>, output: &Path) -> Result<(), LaunchError> {
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    convert(&checkpoint, &config(quantization).into(), &Host::default(), output, false, &mut |_, _| {
        ControlFlow::Continue(())
    })
}

fn bits(checkpoint: &Checkpoint, config: &EngineConfig) -> Result<Vec<u32>, LaunchError> {
    let tokens: Vec<u32> = (0..40).map(|index| index * 7 % 320).collect();
    Ok(logits(checkpoint, &tokens, config, 16)?.iter().map(|value| value.to_bits()).collect())
}

#[test]
fn converted_model_has_the_same_bits() {
    let (model, scratch) = (TinyModel::write(), Scratch::new("bits"));
    let original = Checkpoint::open(model.path()).unwrap();
    for (index, quantization) in
        std::iter::once(None).chain(WeightType::ALL.iter().copied().map(Some)).enumerate()
    {
        let expected = bits(&original, &config(quantization)).unwrap();
        for name in [format!("model-{index}"), format!("model-{index}.tar")] {
            let path = scratch.path(&name);
            write(&model, quantization, &path).unwrap();
            let converted = Checkpoint::open(&path).unwrap();
            assert_eq!(bits(&converted, &config(None)).unwrap(), expected, "{quantization:?}");
            assert_eq!(bits(&converted, &config(quantization)).unwrap(), expected, "{quantization:?}");
            assert_eq!(
                (converted.config(), converted.text().generation()),
                (original.config(), original.text().generation())
            );
        }
        let archive = Bytes::from(fs::read(scratch.path(&format!("model-{index}.tar"))).unwrap());
        let in_memory = Checkpoint::from_bytes(archive).unwrap();
        assert_eq!(bits(&in_memory, &config(None)).unwrap(), expected, "{quantization:?}");
    }
}

#[test]
fn mapped_weights_are_counted_but_not_in_the_arena() {
    let (model, scratch) = (TinyModel::write(), Scratch::new("memory"));
    let path = scratch.path("model.tar");
    write(&model, None, &path).unwrap();
    let config = EngineConfig { kv_cache_blocks: Some(32), max_model_len: Some(256), ..config(None) };
    let launch = |checkpoint: &Checkpoint, config: &EngineConfig| {
        let (_, info) =
            penstock_runner::launch(checkpoint, &config.clone().into(), &Host::default(), &mut |_, _| {
                ControlFlow::Continue(())
            })?;
        Ok::<_, LaunchError>(info.memory)
    };
    let (_, direct) = model.launch(&config).unwrap();
    let mapped = launch(&Checkpoint::open(&path).unwrap(), &config).unwrap();
    assert_eq!(mapped.weights, direct.memory.weights);
    // The norms are in the arena.
    let vectors = 7 * 4096;
    assert_eq!(direct.memory.peak - mapped.peak, mapped.weights - vectors);
    // A limit below the weights is too low for a mapped model, but not for a model that is already in memory.
    let in_memory = Checkpoint::from_bytes(Bytes::from(fs::read(&path).unwrap())).unwrap();
    let needed = mapped.workspace + mapped.inputs + mapped.kv_cache + vectors;
    assert!(launch(&in_memory, &config).unwrap().weights == mapped.weights);
    let ratio = (needed + mapped.weights / 2) as f64 / mapped.limit as f64 * 0.9;
    let small = EngineConfig { memory_ratio: Some(ratio), ..config };
    assert!(matches!(launch(&Checkpoint::open(&path).unwrap(), &small), Err(LaunchError::OutOfMemory(_))));
    launch(&in_memory, &small).unwrap();
}

#[test]
fn options_that_contradict_the_conversion_are_errors() {
    let (model, scratch) = (TinyModel::write(), Scratch::new("options"));
    let path = scratch.path("model");
    write(&model, Some(WeightType::Int8), &path).unwrap();
    let converted = Checkpoint::open(&path).unwrap();
    let error = |config| bits(&converted, &config).unwrap_err().to_string();
    assert_eq!(
        error(config(Some(WeightType::Int4))),
        "quantization=int4 is not allowed: it must be auto or int8, as the model was converted"
    );
    assert_eq!(
        error(EngineConfig { dtype: Auto(Some(Dtype::Bf16)), ..config(None) }),
        "dtype=bfloat16 is not allowed: it must be auto or float32, the type of the converted model"
    );
    let again = convert(
        &converted,
        &config(None).into(),
        &Host::default(),
        &scratch.path("again"),
        false,
        &mut |_, _| ControlFlow::Continue(()),
    );
    assert!(again.unwrap_err().to_string().ends_with("is converted already; convert the original model"));
    assert_eq!(scratch.names(), ["model"]);
}

#[test]
fn output_that_exists_is_refused_unless_it_is_overwritten() {
    let (model, scratch) = (TinyModel::write(), Scratch::new("output"));
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    let run = |name: &str, overwrite| {
        convert(
            &checkpoint,
            &config(None).into(),
            &Host::default(),
            &scratch.path(name),
            overwrite,
            &mut |_, _| ControlFlow::Continue(()),
        )
    };
    run("model", false).unwrap();
    let error = run("model", false).unwrap_err().to_string();
    assert!(error.ends_with("it must be a new path, or a converted model with overwrite=True (--overwrite)"));
    // The replaced files stay mapped.
    let replaced = Checkpoint::open(scratch.path("model")).unwrap();
    let expected = bits(&replaced, &config(None)).unwrap();
    run("model", true).unwrap();
    assert_eq!(bits(&replaced, &config(None)).unwrap(), expected);
    // Only converted models are replaced.
    fs::create_dir(scratch.path("precious")).unwrap();
    fs::write(scratch.path("precious").join("file"), "x").unwrap();
    let error = run("precious", true).unwrap_err();
    assert!(matches!(&error, LaunchError::Config(error) if error.field == "output"), "{error}");
    assert!(run("precious.tar/model.tar", true).is_ok(), "directories above the output are made");
    assert!(matches!(run("precious.tar", true), Err(LaunchError::Config(_))));
    assert_eq!(scratch.names(), ["model", "precious", "precious.tar"]);
    fs::write(scratch.path("backup.tar"), "x").unwrap();
    assert!(matches!(run("backup.tar", true), Err(LaunchError::Config(_))));
    assert_eq!(fs::read(scratch.path("backup.tar")).unwrap(), b"x");
    fs::write(scratch.path("model").join("notes"), "x").unwrap();
    assert!(matches!(run("model", true), Err(LaunchError::Config(_))), "another file would be lost");
    assert!(scratch.path("model").join("notes").exists());
    run("archive.tar", false).unwrap();
    assert!(matches!(run("archive.tar", false), Err(LaunchError::Config(_))));
    run("archive.tar", true).unwrap();
}

#[test]
fn names_left_by_a_killed_process_are_skipped() {
    let (model, scratch) = (TinyModel::write(), Scratch::new("left"));
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    for number in 0..40 {
        let name = |output| format!(".{output}.{}-{number}.tmp", std::process::id());
        fs::create_dir(scratch.path(&name("model"))).unwrap();
        fs::write(scratch.path(&name("model.tar")), "x").unwrap();
    }
    for output in ["model", "model.tar"] {
        let path = scratch.path(output);
        convert(&checkpoint, &config(None).into(), &Host::default(), &path, false, &mut |_, _| {
            ControlFlow::Continue(())
        })
        .unwrap();
        assert!(Checkpoint::open(path).is_ok());
    }
}

#[test]
fn cancelled_or_failed_conversion_leaves_nothing() {
    let (model, scratch) = (TinyModel::write(), Scratch::new("cancelled"));
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    for name in ["model", "model.tar"] {
        let mut calls = 0;
        let cancelled = convert(
            &checkpoint,
            &config(None).into(),
            &Host::default(),
            &scratch.path(name),
            false,
            &mut |_, _| {
                calls += 1;
                if calls == 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            },
        );
        assert!(matches!(cancelled, Err(LaunchError::Cancelled)));
        assert_eq!(scratch.names(), [""; 0]);
    }
    // A parent of the output is a file.
    fs::write(scratch.path("file"), "").unwrap();
    let error = write(&model, None, &scratch.path("file").join("model")).unwrap_err();
    assert!(matches!(error, LaunchError::Write(_)), "{error}");
    assert_eq!(scratch.names(), ["file"]);
}

/// Opens a model and computes its logits.
fn use_model(path: &Path) -> Result<Vec<u32>, LaunchError> {
    bits(&Checkpoint::open(path).map_err(LaunchError::Checkpoint)?, &config(None))
}

#[test]
fn every_damaged_byte_is_an_error() {
    let (model, scratch) = (TinyModel::write(), Scratch::new("damage"));
    let path = scratch.path("model");
    write(&model, Some(WeightType::Int4), &path).unwrap();
    for name in ["model.penstock", "weights.safetensors"] {
        let file = path.join(name);
        let original = fs::read(&file).unwrap();
        let step = original.len() / 150 + 1;
        for at in (0..original.len()).step_by(step).chain([original.len() - 1]) {
            let mut damaged = original.clone();
            damaged[at] ^= 1 << (at % 8);
            fs::write(&file, &damaged).unwrap();
            let error = use_model(&path).expect_err(&format!("byte {at} of {name}")).to_string();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        for len in [0, 1, 8, original.len() / 2, original.len() - 1] {
            fs::write(&file, &original[..len]).unwrap();
            use_model(&path).expect_err(&format!("{len} bytes of {name}"));
        }
        let longer: Vec<u8> = original.iter().copied().chain([0; 64]).collect();
        fs::write(&file, longer).unwrap();
        use_model(&path).expect_err("a longer file");
        fs::remove_file(&file).unwrap();
        use_model(&path).expect_err("a missing file");
        fs::write(&file, &original).unwrap();
    }
    use_model(&path).unwrap();
}

#[test]
fn damaged_archive_is_an_error_or_equal() {
    let (model, scratch) = (TinyModel::write(), Scratch::new("archive"));
    let path = scratch.path("model.tar");
    write(&model, Some(WeightType::Int8), &path).unwrap();
    let original = fs::read(&path).unwrap();
    let compute = |bytes: Vec<u8>| {
        bits(&Checkpoint::from_bytes(bytes.into()).map_err(LaunchError::Checkpoint)?, &config(None))
    };
    let expected = compute(original.clone()).unwrap();
    // Padding and unused fields of the archive have no meaning.
    for at in (0..512).chain((512..original.len()).step_by(original.len() / 100)) {
        let mut damaged = original.clone();
        damaged[at] ^= 4;
        if let Ok(found) = compute(damaged) {
            assert_eq!(found, expected, "byte {at}");
        }
    }
    for len in [0, 1, 511, 512, 1024, original.len() / 2] {
        let error = compute(original[..len].to_vec()).expect_err(&format!("{len} bytes")).to_string();
        assert!(error.starts_with("<bytes>"), "{error}");
    }
}

#[test]
fn other_versions_and_layouts_are_refused_by_name() {
    let (model, scratch) = (TinyModel::write(), Scratch::new("versions"));
    let path = scratch.path("model");
    write(&model, None, &path).unwrap();
    let graph = path.join("model.penstock");
    let original = fs::read(&graph).unwrap();
    // The array, the magic string of 24 bytes, the version.
    assert_eq!((original[0], original[1], original[26]), (0x94, 0xb8, 1));
    let mut other = original.clone();
    other[26] = 9;
    fs::write(&graph, &other).unwrap();
    let error = use_model(&path).unwrap_err().to_string();
    assert!(
        error.ends_with("version is 9; supported: 1; convert the model again with this version of penstock")
    );
    other[10] = b'x';
    fs::write(&graph, &other).unwrap();
    let error = use_model(&path).unwrap_err().to_string();
    assert!(error.ends_with("is not a converted model; `penstock convert` writes one"), "{error}");

    let conversion = Conversion { layout: "other-7".to_owned(), ..empty() };
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    let other = scratch.path("other");
    ConvertedWriter::create(&other, false, &[]).unwrap().finish(&checkpoint, conversion).unwrap();
    let error = use_model(&other).unwrap_err().to_string();
    assert!(
        error.contains("layout is \"other-7\"; supported: panels16-1; convert the model again"),
        "{error}"
    );
}

fn empty() -> Conversion {
    Conversion {
        layout: "panels16-1".to_owned(),
        dtype: Dtype::F32,
        quantization: "auto".to_owned(),
        matrices: Default::default(),
    }
}

/// Copies a converted model after a change of the properties or the bytes of its matrices.
fn copy_changed(model: &Path, output: &Path, change: impl FnOnce(&mut Conversion, &mut Vec<Stored>)) {
    let checkpoint = Checkpoint::open(model).unwrap();
    let file = fs::read(model.join("weights.safetensors")).unwrap();
    let start = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&file[8..start]).unwrap();
    let offset = |tensor: &serde_json::Value, index: usize| tensor["data_offsets"][index].as_u64().unwrap();
    let mut tensors: Vec<_> = header.iter().collect();
    tensors.sort_by_key(|(_, tensor)| offset(tensor, 0));
    let mut stored: Vec<_> = tensors
        .into_iter()
        .map(|(name, tensor)| {
            let bytes = &file[start + offset(tensor, 0) as usize..start + offset(tensor, 1) as usize];
            Stored { name: name.clone(), is_matrix: tensor["dtype"] == "U8", bytes: bytes.to_vec() }
        })
        .collect();
    let mut conversion = checkpoint.conversion().unwrap().clone();
    change(&mut conversion, &mut stored);
    let tensors: Vec<_> = stored
        .iter()
        .map(|Stored { name, is_matrix, bytes }| match is_matrix {
            true => NewTensor::Matrix { name: name.clone(), bytes: bytes.len() as u64 },
            false => NewTensor::Vector { name: name.clone(), len: bytes.len() / 4 },
        })
        .collect();
    let mut writer = ConvertedWriter::create(output, true, &tensors).unwrap();
    stored.iter().for_each(|tensor| writer.write(&tensor.bytes).unwrap());
    writer.finish(&checkpoint, conversion).unwrap();
}

/// A tensor of `weights.safetensors`.
struct Stored {
    name: String,
    is_matrix: bool,
    bytes: Vec<u8>,
}

#[test]
fn changed_field_of_a_matrix_is_an_error_that_names_it() {
    let (model, scratch) = (TinyModel::write(), Scratch::new("fields"));
    let (original, changed) = (scratch.path("original"), scratch.path("changed"));
    write(&model, Some(WeightType::Int4), &original).unwrap();
    copy_changed(&original, &changed, |_, _| ());
    assert_eq!(use_model(&changed).unwrap(), use_model(&original).unwrap());
    let layer = "model.layers.1.self_attn";
    let qkv = ["q_proj", "k_proj", "v_proj"].map(|part| format!("{layer}.{part}.weight")).join("+");
    let grid = |change: fn(&mut Grid)| {
        Box::new(move |matrix: &mut FusedMatrix| match &mut matrix.parts[0].format {
            WeightFormat::Grid(grid) => change(grid),
            WeightFormat::Float(_) => unreachable!("the model has 4-bit weights"),
        }) as Box<dyn Fn(&mut FusedMatrix)>
    };
    // A change that keeps the number of bytes is not an error.
    let mut changes = vec![
        grid(|grid| grid.bits = CodeBits::Eight),
        grid(|grid| grid.bits = CodeBits::Six),
        grid(|grid| grid.group = None),
        grid(|grid| grid.group = Some(0)),
        grid(|grid| grid.group = Some(1)),
        grid(|grid| grid.group = Some(64)),
        grid(|grid| grid.group = Some(4096)),
        grid(|grid| grid.scales = ScaleFormat::F32),
        grid(|grid| grid.minimum = Minimum::Centred),
        grid(|grid| grid.activations = Activations::Float),
        Box::new(|matrix| matrix.parts[0].format = Dtype::F32.into()),
        Box::new(|matrix| matrix.parts[0].tensor = "x".to_owned()),
        Box::new(|matrix| matrix.parts[0].tensor.clear()),
        Box::new(|matrix| matrix.parts.swap(0, 1)),
        Box::new(|matrix| matrix.parts.truncate(1)),
        Box::new(|matrix| matrix.parts.clear()),
        Box::new(|matrix| matrix.parts.push(matrix.parts[0].clone())),
    ];
    for size in [0, 1, 63, 65, 1 << 32, usize::MAX / 4, usize::MAX / 2, usize::MAX] {
        changes.push(Box::new(move |matrix| matrix.columns = size));
        changes.push(Box::new(move |matrix| matrix.parts[0].rows = size));
    }
    for (index, change) in changes.iter().enumerate() {
        copy_changed(&original, &changed, |conversion, _| {
            change(conversion.matrices.get_mut(&qkv).unwrap());
        });
        assert_names(&changed, &qkv, &format!("change {index}"));
    }
    let bytes: [fn(&mut Stored); 5] = [
        |tensor| tensor.bytes.truncate(tensor.bytes.len() - 64),
        |tensor| tensor.bytes.extend([0; 64]),
        |tensor| tensor.bytes.clear(),
        |tensor| tensor.is_matrix = false,
        |tensor| tensor.name = "x".to_owned(),
    ];
    for (index, change) in bytes.iter().enumerate() {
        copy_changed(&original, &changed, |_, tensors| {
            change(tensors.iter_mut().find(|tensor| tensor.name == qkv).unwrap());
        });
        assert_names(&changed, &qkv, &format!("change {index} of the bytes"));
    }
    copy_changed(&original, &changed, |conversion, _| drop(conversion.matrices.remove(&qkv)));
    assert_names(&changed, &qkv, "no entry");
}

/// The error of a model names the matrix.
fn assert_names(model: &Path, matrix: &str, change: &str) {
    let error = use_model(model).map(drop).expect_err(change);
    assert!(matches!(&error, LaunchError::Checkpoint(_)), "{change}: {error:?}");
    assert!(error.to_string().contains(matrix), "{change}: {error}");
}
