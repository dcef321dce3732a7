//! The order in which a model uses its weights, by their names.

use std::cmp::Reverse;

/// A weight's place in the model, as its name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// Before the layers.
    Before,
    /// In a layer.
    Layer(u64),
    /// After the layers.
    After,
}

/// What an embedding is to the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Embedding {
    /// Rows of it are looked up: it is of forward passes alone.
    Lookup,
    /// It is the head too: the forward pass takes it again at its end, and the backward pass at its beginning.
    Tied,
}

impl Embedding {
    /// Every one, by its name.
    pub const CHOICES: [(&'static str, Self); 2] = [("lookup", Self::Lookup), ("tied", Self::Tied)];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lookup => "lookup",
            Self::Tied => "tied",
        }
    }
}

/// In which order a forward pass takes weights, by their numbers.
#[derive(Debug, PartialEq, Eq)]
pub struct Order {
    /// Numbers of weights, one twice where it is used twice.
    pub forward: Vec<usize>,
    /// Whether names have numbers of layers; else the order is that of the file.
    pub has_layers: bool,
    /// Weights of forward passes alone.
    pub lookups: Vec<usize>,
    /// The embedding of tokens: of several the one with most rows.
    pub tokens: Option<usize>,
    /// The same, if it is the head too.
    pub tied: Option<usize>,
}

impl Order {
    /// By the number of their layer. Of those without one embeddings come first, the head comes last, and the others stay before the layers or after them, as in the file. An embedding of tokens is `embedding`; where
    /// that is not said, it is the head too if there is none beside it. `rows` are those of the weights, which tell it from other embeddings.
    pub fn new(names: &[&str], rows: &[u64], embedding: Option<Embedding>) -> Self {
        let first = names.iter().position(|name| layer(name).is_some());
        let place = |number: usize| match (layer(names[number]), first) {
            (Some(layer), _) => Place::Layer(layer),
            (None, _) if is_head(names[number]) => Place::After,
            (None, _) if is_embedding(names[number]) => Place::Before,
            (None, Some(first)) if number > first => Place::After,
            (None, _) => Place::Before,
        };
        let mut forward: Vec<usize> = (0..names.len()).collect();
        if first.is_some() {
            // The head is after all others that come after the layers.
            forward.sort_by_key(|number| (place(*number), is_head(names[*number])));
        }
        let has_head = names.iter().any(|name| is_head(name));
        let is_tied = embedding.map_or(first.is_some() && !has_head, |embedding| embedding == Embedding::Tied);
        let tokens = forward.iter().copied().filter(|number| is_of_tokens(names[*number])).min_by_key(|number| Reverse(rows[*number]));
        let tied = tokens.filter(|_| is_tied);
        let lookups = forward.iter().copied().filter(|number| Some(*number) != tied && is_embedding(names[*number])).collect();
        forward.extend(tied);
        Self { forward, has_layers: first.is_some(), lookups, tokens, tied }
    }
}

/// What gives logits, by a word of its name; so does a word that ends with `head`.
const HEADS: [&str; 5] = ["output", "output_layer", "embed_out", "score", "classifier"];

/// The first number between dots of a name.
fn layer(name: &str) -> Option<u64> {
    name.split('.').find_map(|word| word.parse().ok())
}

/// `lm_head`, or one of [`HEADS`].
fn is_head(name: &str) -> bool {
    layer(name).is_none() && name.split('.').any(|word| word.ends_with("head") || HEADS.contains(&word))
}

/// `embed_tokens`, `wte`, `tok_embeddings`, `wpe`, ...: what rows are looked up in.
fn is_embedding(name: &str) -> bool {
    let is_word = |word: &str| word.contains("embed") || word == "wte" || word == "wpe";
    layer(name).is_none() && !is_head(name) && name.split('.').any(is_word)
}

fn is_of_tokens(name: &str) -> bool {
    is_embedding(name) && !name.contains("pos") && !name.contains("wpe") && !name.contains("type")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order<'a>(names: &[&'a str], embedding: Option<Embedding>) -> (Vec<&'a str>, Vec<&'a str>, Option<&'a str>) {
        let order = Order::new(names, &vec![1; names.len()], embedding);
        let named = |numbers: &[usize]| numbers.iter().map(|number| names[*number]).collect();
        (named(&order.forward), named(&order.lookups), order.tied.map(|number| names[number]))
    }

    #[test]
    fn layers_are_counted_as_numbers() {
        let names = ["embed", "h.10.a", "h.2.b", "head", "h.2.a", "norm.w"];
        assert_eq!(order(&names, None), (vec!["embed", "h.2.b", "h.2.a", "h.10.a", "norm.w", "head"], vec!["embed"], None));
        let file = Order::new(&["b", "a"], &[1, 1], None);
        assert_eq!((file.forward, file.has_layers, file.tied), (vec![0, 1], false, None));
        assert!(Order::new(&[], &[], None).forward.is_empty());
    }

    /// Files of the safetensors library are sorted by name: `lm_head` stands first.
    #[test]
    fn the_head_is_last_and_the_embedding_is_looked_up() {
        let names = ["lm_head.weight", "model.embed_tokens.weight", "model.layers.0.q.weight", "model.layers.1.q.weight"];
        let [head, embedding, first, second] = names;
        assert_eq!(order(&names, None), (vec![embedding, first, second, head], vec![embedding], None));
        for (embedding, head) in [
            ("tok_embeddings.weight", "output.weight"),
            ("transformer.wte.weight", "lm_head.weight"),
            ("embedding.word_embeddings.weight", "output_layer.weight"),
            ("embed.weight", "score.weight"),
            ("embed.weight", "classifier.weight"),
        ] {
            let names = [embedding, "layers.0.wq.weight", "layers.0.output.dense.weight", head];
            assert_eq!(order(&names, None), (names.to_vec(), vec![embedding], None));
        }
        // As the files of an index may have them.
        let names = ["layers.0.w", "norm.w", "head", "embed", "wpe"];
        assert_eq!(order(&names, None).0, ["embed", "wpe", "layers.0.w", "norm.w", "head"]);
        let names = ["gpt_neox.embed_in.weight", "embed_out.weight", "gpt_neox.layers.0.w"];
        assert_eq!(order(&names, None).0, [names[0], names[2], names[1]]);
    }

    #[test]
    fn an_embedding_without_a_head_is_the_head_too() {
        let names = ["wpe.weight", "wte.weight", "h.0.w"];
        assert_eq!(order(&names, None), (vec!["wpe.weight", "wte.weight", "h.0.w", "wte.weight"], vec!["wpe.weight"], Some("wte.weight")));
        let lookup = order(&names, Some(Embedding::Lookup));
        assert_eq!(lookup, (names.to_vec(), vec!["wpe.weight", "wte.weight"], None));
        let names = ["lm_head.weight", "embed_tokens.weight", "h.0.w"];
        assert_eq!(order(&names, Some(Embedding::Tied)).0, ["embed_tokens.weight", "h.0.w", "lm_head.weight", "embed_tokens.weight"]);
    }
    #[test]
    fn the_embedding_of_tokens_has_most_rows() {
        let names = ["audio.embed.proj", "language.embed_tokens", "vision.patch_embed", "layers.0.w"];
        let of_rows = |rows: [u64; 4], embedding| Order::new(&names, &rows, embedding);
        let tied = of_rows([64, 1000, 64, 64], None);
        assert_eq!((tied.tokens, tied.tied, tied.lookups), (Some(1), Some(1), vec![0, 2]));
        let lookup = of_rows([64, 64, 1000, 64], Some(Embedding::Lookup));
        assert_eq!((lookup.tokens, lookup.tied, lookup.lookups), (Some(2), None, vec![0, 1, 2]));
        assert_eq!(Order::new(&["shared", "wpe", "layers.0.w"], &[9, 9, 9], Some(Embedding::Tied)).tokens, None);
    }
}
