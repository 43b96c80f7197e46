//! Time of compilation, masks and accepted tokens with a vocabulary of 150,000 tokens. `cargo bench --bench guidance`
//! prints medians.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use penstock_guidance::{
    GrammarCompiler, GrammarMatcher, GrammarSpec, GuidanceLimits, TokenText, Vocabulary,
};

const NUM_TOKENS: usize = 150_000;
const ROUNDS: usize = 201;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn pick<'list>(&mut self, list: &[&'list str]) -> &'list str {
        list[((u128::from(self.next()) * list.len() as u128) >> 64) as usize]
    }
}

/// A vocabulary like a trained one: every byte, words with and without a leading space in three cases, numbers, runs of
/// punctuation and spaces, and characters beyond ASCII.
fn vocabulary() -> Vocabulary {
    const SYLLABLES: [&str; 24] = [
        "a", "an", "at", "con", "de", "en", "er", "es", "in", "ing", "is", "le", "ment", "ne", "on", "or",
        "pro", "re", "st", "ter", "ti", "tion", "un", "ve",
    ];
    const SIGNS: [&str; 20] = [
        "\"", "{", "}", "[", "]", ":", ",", ".", "(", ")", "=", "<", ">", "/", "\\", "-", "_", "'", ";", "\n",
    ];
    const BEYOND: [&str; 12] = ["é", "ü", "ñ", "д", "о", "日", "本", "語", "的", "한", "ا", "🙂"];
    let mut random = Random(7);
    let mut words: BTreeSet<String> = (0..1_000).map(|number| number.to_string()).collect();
    words.extend((2..80).map(|length| " ".repeat(length)));
    while words.len() < NUM_TOKENS - 256 - 1 {
        let (parts, times): (&[&str], u64) = match random.next() % 16 {
            0 => (&SIGNS, 2 + random.next() % 3),
            1 | 2 => (&BEYOND, 1 + random.next() % 4),
            _ => (&SYLLABLES, 1 + random.next() % 5),
        };
        let word: String = (0..times).map(|_| random.pick(parts)).collect();
        let word = match random.next() % 8 {
            0 => word.to_uppercase(),
            1 => {
                word[..1.min(word.find(|first: char| first.is_ascii()).map_or(0, |_| 1))].to_uppercase()
                    + &word
            }
            _ => word,
        };
        words.insert(if random.next().is_multiple_of(2) { format!(" {word}") } else { word });
    }
    let mut texts: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    texts.extend(words.into_iter().filter(|word| word.len() > 1).map(String::into_bytes));
    let end = texts.len() as u32;
    let ids: std::collections::HashMap<Vec<u8>, u32> = texts.iter().cloned().zip(0..).collect();
    let encode = move |text: &str| {
        let (mut rest, mut tokens) = (text.as_bytes(), Vec::new());
        while !rest.is_empty() {
            let longest =
                (1..=rest.len().min(80)).rev().find_map(|length| Some((*ids.get(&rest[..length])?, length)));
            let (id, length) = longest.expect("every byte is a token");
            tokens.push(id);
            rest = &rest[length..];
        }
        tokens
    };
    let mut table: Vec<_> =
        texts.into_iter().map(|bytes| Some(TokenText { bytes, special: false })).collect();
    table.push(Some(TokenText { bytes: b"<|end|>".to_vec(), special: true }));
    Vocabulary::new(table, &[end], Arc::new(encode)).expect("a valid vocabulary")
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn microseconds<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let value = work();
    (start.elapsed().as_nanos() as f64 / 1e3, value)
}

fn accept_all(matcher: &mut GrammarMatcher, text: &str) {
    text.bytes().for_each(|byte| matcher.accept(u32::from(byte)).expect("the text matches the grammar"));
}

fn main() {
    let (took, vocabulary) = microseconds(vocabulary);
    println!("{:<58} {took:>10.0} us", "words and vocabulary");
    let vocabulary = Arc::new(vocabulary);
    let (took, compiler) = microseconds(|| {
        GrammarCompiler::new(vocabulary, GuidanceLimits::default()).expect("a valid vocabulary")
    });
    println!("{:<58} {took:>10.0} us", "GrammarCompiler::new");
    let schema = r#"{"type":"object","properties":{"name":{"type":"string"},"size":{"type":"integer"},"colour":{"enum":["red",
        "green","blue"]},"tags":{"type":"array","items":{"type":"string","maxLength":40}},"place":{"type":"object","properties":
        {"street":{"type":"string","pattern":"^[A-Z][a-z ]+ [0-9]+$"},"zip":{"type":"string","pattern":"^[0-9]{5}$"}},"required":
        ["street","zip"]}},"required":["name","size"]}"#;
    let prefix = r#"{"name": "Ada", "size": 12, "tags": ["x"], "place": {"street": "Main "#;
    let number = GrammarSpec::Regex(r"\d{1,6}(\.\d{1,6})?".into());
    let object = GrammarSpec::JsonObject;
    let schema = GrammarSpec::JsonSchema(schema.into());
    let mut mask = vec![0; NUM_TOKENS.div_ceil(32)];
    for (title, grammar, text) in [
        ("schema, at the start", &schema, ""),
        ("schema, in a string", &schema, &prefix[..12]),
        ("schema, after a property", &schema, r#"{"name": "Ada", "size": 12"#),
        (
            "schema, in a string of limited length",
            &schema,
            &prefix[..prefix.find("x\"").expect("the prefix contains an x") + 1],
        ),
        ("schema, in a string with a pattern", &schema, prefix),
        ("any object, in a string", &object, r#"{"a": {"b": "c"#),
        ("any object, before a value", &object, r#"{"a": {"b": "#),
        ("any object, after a value", &object, r#"{"a": {"b": "c""#),
        ("regular expression", &number, "12"),
    ] {
        let (compiling, compiled) = microseconds(|| compiler.compile(grammar).expect("a valid grammar"));
        let (mut starting, mut first, mut accepting, mut later) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let (took, mut matcher) = microseconds(|| compiled.start().expect("a compiled grammar"));
            starting.push(took);
            let (took, ()) = microseconds(|| accept_all(&mut matcher, text));
            accepting.push(took / text.len().max(1) as f64);
            first.push(microseconds(|| matcher.mask(&mut mask).expect("a mask")).0);
            // Each sequence has its own automaton, so its first mask of a kind builds the states.
            if let Some(byte) =
                b"e5\",".iter().find(|&&byte| mask[byte as usize / 32] >> (byte % 32) & 1 == 1)
            {
                matcher.accept(u32::from(*byte)).expect("the mask allows it");
            }
            later.push(microseconds(|| matcher.mask(&mut mask).expect("a mask")).0);
        }
        println!(
            "{title:<42} first mask {:>7.1} us, next mask {:>6.1}; accept {:>5.2}; start {:>5.1}; compile {compiling:>8.1}",
            median(first),
            median(later),
            median(accepting),
            median(starting),
        );
    }
}
