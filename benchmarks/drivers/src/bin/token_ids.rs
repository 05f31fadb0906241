//! Encodes texts with the tokenizer of a folder, for `scripts/folder_parity.py`.
//!
//! ```text
//! Usage: token_ids FOLDER
//! ```
//!
//! The standard input is a JSON list of texts. The output is a JSON list with, for each text, its
//! tokens and the text that these decode to.

use gpipe_data::Tokenizer;
use gpipe_drivers::Failure;

fn main() -> Result<(), Failure> {
    let folder = std::env::args().nth(1).ok_or("usage: token_ids FOLDER")?;
    let texts: Vec<String> = serde_json::from_reader(std::io::stdin().lock())?;
    let tokenizer = Tokenizer::load(&std::path::Path::new(&folder).join("tokenizer.json"))?;
    let mut all = Vec::with_capacity(texts.len());
    for text in texts {
        let tokens = tokenizer.encode(&text)?;
        let decoded = tokenizer.decode_text(&tokens)?;
        let mut stream = tokenizer.stream();
        let mut streamed = String::new();
        for token in &tokens {
            streamed.push_str(&stream.push(*token)?);
        }
        streamed.push_str(&stream.rest()?);
        all.push(serde_json::json!([tokens, decoded, streamed]));
    }
    println!("{}", serde_json::Value::from(all));
    Ok(())
}
