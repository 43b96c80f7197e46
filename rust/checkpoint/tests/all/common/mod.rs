//! Test support: temporary directories, a GGUF writer, a safetensors writer.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use penstock_checkpoint::{Checkpoint, CheckpointError};

/// A temporary directory, removed on drop.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("penstock-checkpoint-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Scratch(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file and returns its path. An existing file is removed, not truncated: some file systems flush
    /// truncated files to disk immediately, and these tests write thousands.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, contents).unwrap();
        path
    }

    pub fn open(&self) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open(&self.0)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs `work`, and returns its result and the warnings that this thread logs meanwhile.
pub fn warnings_of<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    // An error: another test has set the logger.
    let _ = log::set_logger(&Collector);
    log::set_max_level(log::LevelFilter::Warn);
    WARNINGS.take();
    let result = work();
    (result, WARNINGS.take())
}

thread_local! {
    static WARNINGS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Collects the messages of each thread.
struct Collector;

impl log::Log for Collector {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        WARNINGS.with_borrow_mut(|warnings| warnings.push(record.args().to_string()));
    }

    fn flush(&self) {}
}

/// All elements of a tensor.
pub fn read(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let tensor = checkpoint.tensor(name).unwrap();
    let mut values = vec![f32::NAN; tensor.rows() * tensor.columns()];
    tensor.read_rows(0..tensor.rows(), &mut values);
    values
}

pub fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The error message of a checkpoint that must not open.
pub fn open_error(result: Result<Checkpoint, CheckpointError>) -> String {
    result.unwrap_err().to_string()
}

/// A safetensors file with the given header and data.
pub fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

#[derive(Clone, Debug)]
pub enum Field {
    U32(u32),
    U64(u64),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    /// A raw value type and bytes.
    Raw(u32, Vec<u8>),
}

/// A GGUF file to be written.
#[derive(Clone, Debug)]
pub struct Gguf {
    pub version: u32,
    pub fields: Vec<(String, Field)>,
    /// Name, dimensions in ggml's order (fastest first), ggml type, bytes.
    pub tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
    pub alignment: usize,
}

pub const HIDDEN: usize = 8;
pub const HEADS: usize = 2;
pub const KV_HEADS: usize = 1;
pub const HEAD_DIM: usize = 4;
pub const VOCABULARY: usize = 6;

impl Gguf {
    pub fn empty() -> Self {
        Gguf { version: 3, fields: Vec::new(), tensors: Vec::new(), alignment: 32 }
    }

    /// A complete model of one layer. The elements of every tensor count up from 0.
    pub fn model(architecture: &str) -> Self {
        let mut file = Gguf::empty();
        file.set("general.architecture", Field::Text(architecture.to_owned()));
        for (key, number) in [
            ("block_count", 1),
            ("context_length", 32),
            ("embedding_length", HIDDEN as u32),
            ("feed_forward_length", 8),
            ("attention.head_count", HEADS as u32),
            ("attention.head_count_kv", KV_HEADS as u32),
        ] {
            file.set(&format!("{architecture}.{key}"), Field::U32(number));
        }
        file.set(&format!("{architecture}.attention.layer_norm_rms_epsilon"), Field::F32(1e-5));
        file.set("tokenizer.ggml.model", Field::Text("gpt2".to_owned()));
        let tokens = ["<s>", "</s>", "a", "b", "ab", "<|im_end|>"].map(str::to_owned);
        file.set("tokenizer.ggml.tokens", Field::Texts(tokens.to_vec()));
        file.set("tokenizer.ggml.token_type", Field::I32s(vec![3, 3, 1, 1, 1, 3]));
        file.set("tokenizer.ggml.merges", Field::Texts(vec!["a b".to_owned()]));
        file.set("tokenizer.ggml.bos_token_id", Field::U32(0));
        file.set("tokenizer.ggml.eos_token_id", Field::U32(1));
        file.set("tokenizer.chat_template", Field::Text("{{ messages }}".to_owned()));

        file.count_up("token_embd.weight", &[HIDDEN, VOCABULARY]);
        file.count_up("output_norm.weight", &[HIDDEN]);
        for (name, dimensions) in [
            ("attn_norm", &[HIDDEN] as &[usize]),
            ("attn_q", &[HIDDEN, HEADS * HEAD_DIM]),
            ("attn_k", &[HIDDEN, KV_HEADS * HEAD_DIM]),
            ("attn_v", &[HIDDEN, KV_HEADS * HEAD_DIM]),
            ("attn_output", &[HEADS * HEAD_DIM, HIDDEN]),
            ("ffn_norm", &[HIDDEN]),
            ("ffn_gate", &[HIDDEN, 8]),
            ("ffn_up", &[HIDDEN, 8]),
            ("ffn_down", &[8, HIDDEN]),
        ] {
            file.count_up(&format!("blk.0.{name}.weight"), dimensions);
        }
        file
    }

    /// Adds or replaces a field.
    pub fn set(&mut self, key: &str, field: Field) {
        match self.fields.iter_mut().find(|(there, _)| there == key) {
            Some((_, place)) => *place = field,
            None => self.fields.push((key.to_owned(), field)),
        }
    }

    pub fn with(mut self, key: &str, field: Field) -> Self {
        self.set(key, field);
        self
    }

    pub fn without(mut self, key: &str) -> Self {
        self.fields.retain(|(there, _)| there != key);
        self
    }

    pub fn tensor(&mut self, name: &str, dimensions: &[usize], ggml_type: u32, bytes: Vec<u8>) {
        let dimensions = dimensions.iter().map(|&dimension| dimension as u64).collect();
        self.tensors.push((name.to_owned(), dimensions, ggml_type, bytes));
    }

    pub fn f32_tensor(&mut self, name: &str, dimensions: &[usize], values: &[f32]) {
        self.tensor(name, dimensions, 0, f32_bytes(values));
    }

    fn count_up(&mut self, name: &str, dimensions: &[usize]) {
        let values: Vec<_> = (0..dimensions.iter().product()).map(|element: usize| element as f32).collect();
        self.f32_tensor(name, dimensions, &values);
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.fields.len() as u64).to_le_bytes());
        for (key, field) in &self.fields {
            text(&mut out, key);
            write_field(&mut out, field);
        }
        let mut data = Vec::new();
        for (name, dimensions, ggml_type, bytes) in &self.tensors {
            text(&mut out, name);
            out.extend((dimensions.len() as u32).to_le_bytes());
            dimensions.iter().for_each(|dimension| out.extend(dimension.to_le_bytes()));
            out.extend(ggml_type.to_le_bytes());
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(data);
        out
    }

    pub fn open(&self) -> Result<Checkpoint, CheckpointError> {
        let scratch = Scratch::new();
        Checkpoint::open(scratch.write("model.gguf", self.bytes()))
    }
}

pub fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn array_head(out: &mut Vec<u8>, kind: u32, count: usize) {
    out.extend(9u32.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend((count as u64).to_le_bytes());
}

fn write_field(out: &mut Vec<u8>, field: &Field) {
    let mut scalar = |kind: u32, bytes: &[u8]| {
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    };
    match field {
        Field::U32(number) => scalar(4, &number.to_le_bytes()),
        Field::I32(number) => scalar(5, &number.to_le_bytes()),
        Field::F32(number) => scalar(6, &number.to_le_bytes()),
        Field::Bool(truth) => scalar(7, &[u8::from(*truth)]),
        Field::U64(number) => scalar(10, &number.to_le_bytes()),
        Field::Raw(kind, bytes) => scalar(*kind, bytes),
        Field::Text(value) => {
            scalar(8, &[]);
            text(out, value);
        }
        Field::Texts(texts) => {
            array_head(out, 8, texts.len());
            texts.iter().for_each(|value| text(out, value));
        }
        Field::I32s(numbers) => {
            array_head(out, 5, numbers.len());
            numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
        }
        Field::F32s(numbers) => {
            array_head(out, 6, numbers.len());
            out.extend(f32_bytes(numbers));
        }
    }
}

/// Tensors of a safetensors file to be written.
#[derive(Clone, Debug, Default)]
pub struct Tensors(pub Vec<(String, &'static str, Vec<usize>, Vec<u8>)>);

impl Tensors {
    pub fn add(&mut self, name: &str, dtype: &'static str, shape: &[usize], bytes: Vec<u8>) {
        self.0.push((name.to_owned(), dtype, shape.to_vec(), bytes));
    }

    /// 32-bit words, which the formats declare as signed.
    pub fn words(&mut self, name: &str, shape: &[usize], words: &[u32]) {
        self.add(name, "I32", shape, words.iter().flat_map(|word| word.to_le_bytes()).collect());
    }

    pub fn bytes(&self) -> Vec<u8> {
        let (mut header, mut data) = (Vec::new(), Vec::new());
        for (name, dtype, shape, bytes) in &self.0 {
            let (start, end) = (data.len(), data.len() + bytes.len());
            header.push(format!(
                r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#
            ));
            data.extend(bytes);
        }
        safetensors(&format!("{{{}}}", header.join(",")), &data)
    }

    /// A directory with these tensors and settings of a quantisation.
    pub fn directory(&self, quantization_config: &str) -> Scratch {
        let scratch = Scratch::new();
        scratch.write("config.json", format!(r#"{{"quantization_config":{quantization_config}}}"#));
        scratch.write("model.safetensors", self.bytes());
        scratch
    }
}
