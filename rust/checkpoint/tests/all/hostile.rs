//! Damaged files: no panics, no allocations out of proportion to the file, and for safetensors the same result as the
//! `safetensors` crate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

use penstock_checkpoint::Checkpoint;
use penstock_types::{GridRows, WeightFormat};
use proptest::collection::vec;
use proptest::prelude::*;
use safetensors::SafeTensors;

use crate::common::{Field, Gguf, Scratch, Tensors, f32_bytes, open_error, safetensors};

/// Counts the allocated bytes of the current thread and their maximum.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn count(change: impl Fn(usize) -> usize) {
    let held = change(ALLOCATED.get());
    ALLOCATED.set(held);
    PEAK.set(PEAK.get().max(held));
}

// SAFETY: every call is forwarded to the system's allocator; the counters neither allocate nor unwind.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(|held| held + layout.size());
        // SAFETY: the caller upholds the contract of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(|held| held.saturating_sub(layout.size()));
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Opens a checkpoint and reads all tensors. `size` is the size of its files. Returns whether it opened.
fn open_and_read(path: &Path, size: usize) -> bool {
    let before = ALLOCATED.get();
    PEAK.set(before);
    let opened = Checkpoint::open(path).map(|checkpoint| {
        for name in checkpoint.names() {
            if let Ok(tensor) = checkpoint.tensor(name) {
                let mut row = vec![0.0; tensor.columns() * usize::from(tensor.rows() > 0)];
                (0..tensor.rows()).for_each(|index| tensor.read_rows(index..index + 1, &mut row));
                if let WeightFormat::Grid(_) = tensor.format() {
                    tensor.read_grid(0..tensor.rows(), &mut GridRows::default());
                }
            }
        }
        checkpoint.description()
    });
    let (peak, limit) = (PEAK.get() - before, 32 * size + (64 << 10));
    assert!(peak <= limit, "{peak} bytes allocated for files of {size}; {opened:?}");
    if let Err(error) = &opened {
        assert!(error.to_string().len() < 1000, "{error}");
    }
    opened.is_ok()
}

/// A small model with every kind of metadata and several tensor types.
fn gguf() -> Vec<u8> {
    let mut file = Gguf::model("llama")
        .with("tokenizer.ggml.scores", Field::F32s(vec![0.0; 6]))
        .with("tokenizer.ggml.add_bos_token", Field::Bool(true))
        .with("general.alignment", Field::U32(32));
    file.f32_tensor("rope_freqs.weight", &[2], &[1.0, 2.0]);
    file.f32_tensor("blk.0.attn_q.bias", &[8], &[0.0; 8]);
    file.tensor("blk.0.more.weight", &[256], 12, vec![1; 144]);
    file.tensor("blk.0.less.weight", &[32, 2], 3, vec![2; 40]);
    file.bytes()
}

/// The length of the header. Any bytes after it are valid weights.
fn header_len(gguf: &[u8]) -> usize {
    let name = b"blk.0.less.weight";
    gguf.windows(name.len()).position(|window| window == name).unwrap() + name.len() + 4 + 16 + 4 + 8
}

const HEADER: &str = r#"{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},
    "b":{"dtype":"BF16","shape":[4],"data_offsets":[16,24]}}"#;
const CONFIG: &str = r#"{"model_type":"llama","eos_token_id":[1,2]}"#;
const INDEX: &str = r#"{"weight_map":{"a":"one.safetensors","b":"one.safetensors"}}"#;
const TOKENIZER_CONFIG: &str = r#"{"bos_token":{"content":"<s>"},
    "chat_template":[{"name":"default","template":"t"}],
    "added_tokens_decoder":{"3":{"content":"x","special":true}}}"#;

fn weights() -> Vec<u8> {
    safetensors(HEADER, &f32_bytes(&[1.0; 6]))
}

/// The files of a complete directory by name.
fn directory() -> [(&'static str, Vec<u8>); 5] {
    [
        ("one.safetensors", weights()),
        ("model.safetensors.index.json", INDEX.into()),
        ("config.json", CONFIG.into()),
        ("tokenizer_config.json", TOKENIZER_CONFIG.into()),
        ("generation_config.json", r#"{"temperature":0.5,"top_k":3,"eos_token_id":1}"#.into()),
    ]
}

/// The bytes with one byte changed to 0, to 255, in its top bit, and by one.
fn damaged(bytes: &[u8], at: usize) -> impl Iterator<Item = Vec<u8>> + '_ {
    let byte = bytes[at];
    [0, 0xff, byte ^ 0x80, byte.wrapping_add(1)].into_iter().map(move |byte| {
        let mut bytes = bytes.to_vec();
        bytes[at] = byte;
        bytes
    })
}

#[test]
fn truncated_gguf_file_is_rejected() {
    let (whole, scratch) = (gguf(), Scratch::new());
    assert!(open_and_read(&scratch.write("model.gguf", &whole), whole.len()));
    for length in 0..whole.len() {
        let path = scratch.write("model.gguf", &whole[..length]);
        assert!(!open_and_read(&path, length), "opened with {length} of {} bytes", whole.len());
        let error = open_error(Checkpoint::open(&path));
        assert!(error.contains("the file is truncated"), "{length} of {} bytes: {error}", whole.len());
    }
}

#[test]
fn gguf_file_with_one_changed_byte_never_panics() {
    let (whole, scratch) = (gguf(), Scratch::new());
    for at in 0..header_len(&whole) {
        for bytes in damaged(&whole, at) {
            open_and_read(&scratch.write("model.gguf", &bytes), bytes.len());
        }
    }
}

#[test]
fn directory_with_one_damaged_file_never_panics() {
    let (files, scratch) = (directory(), Scratch::new());
    let size = files.iter().map(|(_, bytes)| bytes.len()).sum();
    files.iter().for_each(|(name, bytes)| drop(scratch.write(name, bytes)));
    assert!(open_and_read(scratch.path(), size));
    for (name, whole) in &files {
        for at in 0..whole.len() {
            scratch.write(name, &whole[..at]);
            open_and_read(scratch.path(), size);
            for bytes in damaged(whole, at) {
                scratch.write(name, bytes);
                open_and_read(scratch.path(), size);
            }
        }
        scratch.write(name, whole);
    }
}

/// A matrix of 8 rows and 32 columns in the layout of each quantisation method, and its settings.
fn quantised() -> [(Tensors, &'static str); 5] {
    let mut all = [const { Tensors(Vec::new()) }; 5];
    let [gptq, awq, int4, int8, fp8] = &mut all;
    gptq.words("a.qweight", &[4, 8], &[1; 32]);
    gptq.words("a.qzeros", &[2, 1], &[1; 2]);
    gptq.add("a.scales", "F16", &[2, 8], vec![1; 32]);
    gptq.words("a.g_idx", &[32], &std::array::from_fn::<_, 32, _>(|column| column as u32 % 2));
    awq.words("a.qweight", &[32, 1], &[1; 32]);
    awq.words("a.qzeros", &[2, 1], &[1; 2]);
    awq.add("a.scales", "F16", &[2, 8], vec![1; 32]);
    int4.words("a.weight_packed", &[8, 4], &[1; 32]);
    int4.words("a.weight_shape", &[2], &[8, 32]);
    int4.add("a.weight_scale", "BF16", &[8, 2], vec![1; 32]);
    int4.words("a.weight_zero_point", &[1, 2], &[1; 2]);
    int8.add("a.weight", "I8", &[8, 32], vec![1; 256]);
    int8.add("a.weight_scale", "F32", &[8, 1], vec![1; 32]);
    int8.add("a.weight_zero_point", "I8", &[8, 1], vec![1; 8]);
    fp8.add("a.weight", "F8_E4M3", &[8, 32], vec![1; 256]);
    fp8.add("a.weight_scale_inv", "F32", &[2, 2], vec![1; 16]);
    let settings = [
        r#"{"quant_method":"gptq","bits":4,"group_size":16,"desc_act":true,"dynamic":{}}"#,
        r#"{"quant_method":"awq","bits":4,"group_size":16}"#,
        r#"{"quant_method":"compressed-tensors","config_groups":{"g":{"weights":{"num_bits":4,"group_size":16,
            "symmetric":false}}}}"#,
        r#"{"quant_method":"compressed-tensors","config_groups":{"g":{"weights":{"strategy":"channel",
            "symmetric":false}}}}"#,
        r#"{"quant_method":"fp8","weight_block_size":[4,16]}"#,
    ];
    let mut settings = settings.into_iter();
    all.map(|tensors| (tensors, settings.next().unwrap()))
}

#[test]
fn quantised_directory_with_a_changed_byte_never_panics() {
    for (tensors, settings) in quantised() {
        let (scratch, weights) = (tensors.directory(settings), tensors.bytes());
        let config = format!(r#"{{"quantization_config":{settings}}}"#).into_bytes();
        let size = config.len() + weights.len();
        assert!(open_and_read(scratch.path(), size), "{settings}");
        for (name, whole) in [("config.json", &config), ("model.safetensors", &weights)] {
            // The codes and the scales may have any values; the sizes and the indices may not.
            let all = 0..whole.len();
            for at in all.filter(|at| name == "config.json" || *at < 400 || at % 16 == 0) {
                for bytes in damaged(whole, at) {
                    scratch.write(name, bytes);
                    open_and_read(scratch.path(), size);
                }
            }
            scratch.write(name, whole);
        }
    }
}

#[test]
fn huge_counts_and_lengths_allocate_nothing() {
    let (whole, scratch) = (gguf(), Scratch::new());
    // The tensor count, the metadata count, and the length of the first key.
    for at in [8, 16, 24] {
        for count in [1 << 20, 1 << 31, 1 << 32, 1 << 48, i64::MAX as u64, u64::MAX] {
            let mut bytes = whole.clone();
            bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
            assert!(!open_and_read(&scratch.write("model.gguf", &bytes), bytes.len()), "{count} at {at}");
        }
    }
}

/// The tensors as the `safetensors` crate reads them: name, shape, size.
fn reference(bytes: &[u8]) -> Option<Vec<(String, Vec<usize>, usize)>> {
    let tensors = SafeTensors::deserialize(bytes).ok()?;
    let view = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        (name, view.shape().to_vec(), view.data().len())
    };
    let mut tensors: Vec<_> = tensors.tensors().into_iter().map(view).collect();
    tensors.sort();
    Some(tensors)
}

fn ours(scratch: &Scratch, bytes: &[u8]) -> Option<Vec<(String, Vec<usize>, usize)>> {
    scratch.write("model.safetensors", bytes);
    let checkpoint = scratch.open().ok()?;
    let describe = |name: &str| {
        let tensor = checkpoint.tensor(name).ok()?;
        Some((name.to_owned(), tensor.shape().to_vec(), tensor.stored_bytes()))
    };
    checkpoint.names().map(describe).collect()
}

#[test]
fn safetensors_results_match_the_reference_crate() {
    let (whole, scratch) = (weights(), Scratch::new());
    scratch.write("config.json", CONFIG);
    assert!(reference(&whole).is_some());
    let cut = (0..whole.len()).map(|length| whole[..length].to_vec());
    let changed = (0..8 + HEADER.len()).flat_map(|at| damaged(&whole, at));
    for bytes in std::iter::once(whole.clone()).chain(cut).chain(changed) {
        let shown = String::from_utf8_lossy(&bytes).into_owned();
        assert_eq!(ours(&scratch, &bytes), reference(&bytes), "{shown}");
    }
}

fn edits() -> impl Strategy<Value = Vec<(prop::sample::Index, u8)>> {
    vec((any::<prop::sample::Index>(), any::<u8>()), 1..12)
}

fn apply(bytes: &mut [u8], length: usize, edits: &[(prop::sample::Index, u8)]) {
    edits.iter().for_each(|(at, byte)| bytes[at.index(length)] = *byte);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gguf_file_with_random_edits_never_panics(edits in edits()) {
        let (mut bytes, scratch) = (gguf(), Scratch::new());
        let header = header_len(&bytes);
        apply(&mut bytes, header, &edits);
        open_and_read(&scratch.write("model.gguf", &bytes), bytes.len());
    }

    #[test]
    fn directory_with_random_edits_never_panics(which in 0..5usize, edits in edits()) {
        let scratch = Scratch::new();
        let mut size = 0;
        for (index, (name, mut bytes)) in directory().into_iter().enumerate() {
            let length = bytes.len();
            if index == which {
                apply(&mut bytes, length, &edits);
            }
            size += length;
            scratch.write(name, bytes);
        }
        open_and_read(scratch.path(), size);
    }
}
