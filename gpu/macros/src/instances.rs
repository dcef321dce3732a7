//! `#[instances(T = [bf16, f16], CAUSAL = [false, true])]`: which values of the generic parameters are compiled.

use proc_macro2::Span;
use quote::ToTokens;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Error, Expr, GenericParam, Generics, Ident, Result, Token, Type};

/// One generic parameter bound to one value.
#[derive(Clone)]
pub enum Binding {
    /// `type T = bf16;`
    Type { parameter: Ident, value: Type },
    /// `const D: usize = 64;`
    Const { parameter: Ident, ty: Type, value: Expr },
}

impl Binding {
    /// The instance's part of the entry name: `bf16`, `d64`, `causal`; nothing for `false`.
    fn label(&self) -> Option<String> {
        match self {
            Self::Type { value, .. } => Some(identifier_of(value)),
            Self::Const { parameter, value, .. } => {
                let (name, text) = (parameter.to_string().to_lowercase(), value.to_token_stream().to_string());
                match text.as_str() {
                    "true" => Some(name),
                    "false" => None,
                    _ => Some(format!("{name}{}", text.replace(|c: char| !c.is_ascii_alphanumeric(), "").to_lowercase())),
                }
            }
        }
    }
}

fn identifier_of(ty: &Type) -> String {
    let text = ty.to_token_stream().to_string();
    let last = text.rsplit("::").next().unwrap_or(&text);
    last.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '_').collect::<String>().to_lowercase()
}

/// All bindings of one compiled instance, in the order of the function's generic parameters.
pub struct Instance {
    pub bindings: Vec<Binding>,
}

impl Instance {
    /// `amax__bf16`, `attention_forward__d128__causal`, or the bare name.
    pub fn entry_name(&self, kernel: &Ident) -> String {
        let labels = self.bindings.iter().filter_map(Binding::label);
        std::iter::once(kernel.to_string()).chain(labels).collect::<Vec<_>>().join("__")
    }
}

/// Which half of its family an instance is compiled with, by its name alone: two runs of rustc, each without the other half, share the work. FNV-1a, of which all bits count, so that
/// names that differ in their last letter are not all in one half.
pub fn half(name: &str) -> String {
    let hash = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (hash.count_ones() % 2).to_string()
}

struct Choice {
    parameter: Ident,
    values: Punctuated<Type, Token![,]>,
    constants: Punctuated<Expr, Token![,]>,
}

impl Parse for Choice {
    fn parse(input: ParseStream) -> Result<Self> {
        let parameter = input.parse()?;
        input.parse::<Token![=]>()?;
        let list;
        syn::bracketed!(list in input);
        let fork = list.fork();
        // A value is a type or a constant; which one, the function's generics say.
        let values = fork.parse_terminated(Type::parse, Token![,]).unwrap_or_default();
        let constants = list.fork().parse_terminated(Expr::parse, Token![,]).unwrap_or_default();
        list.parse::<proc_macro2::TokenStream>()?;
        Ok(Self { parameter, values, constants })
    }
}

/// Expands the `#[instances]` attributes of a kernel with these generics.
pub fn expand(attributes: &[syn::Attribute], generics: &Generics, kernel: &Ident) -> Result<Vec<Instance>> {
    if generics.params.is_empty() {
        return match attributes.first() {
            Some(extra) => {
                Err(Error::new_spanned(extra, "this kernel has no generic parameters, so it has one instance: remove #[instances]"))
            }
            None => Ok(vec![Instance { bindings: Vec::new() }]),
        };
    }
    if attributes.is_empty() {
        return Err(Error::new(
            kernel.span(),
            "a generic kernel lists what is compiled: add #[instances(NAME = [value, ...])] below #[kernel]",
        ));
    }
    let mut all = Vec::new();
    for attribute in attributes {
        let choices = attribute.parse_args_with(Punctuated::<Choice, Token![,]>::parse_terminated)?;
        all.extend(product(&choices, generics, attribute)?);
    }
    Ok(all.into_iter().map(|bindings| Instance { bindings }).collect())
}

fn product(choices: &Punctuated<Choice, Token![,]>, generics: &Generics, attribute: &syn::Attribute) -> Result<Vec<Vec<Binding>>> {
    if let Some(unknown) = choices.iter().find(|c| generics.params.iter().all(|p| parameter_name(p) != Some(&c.parameter))) {
        return Err(Error::new(unknown.parameter.span(), format!("the kernel has no generic parameter `{}`", unknown.parameter)));
    }
    let mut rows = vec![Vec::new()];
    for parameter in &generics.params {
        let Some(name) = parameter_name(parameter) else {
            return Err(Error::new_spanned(parameter, "a kernel has no lifetime parameters: device views carry none"));
        };
        let choice = choices.iter().find(|c| c.parameter == *name);
        let Some(choice) = choice else {
            return Err(Error::new_spanned(attribute, format!("no values for `{name}`: write `{name} = [..]`")));
        };
        let bindings = bindings_of(parameter, choice)?;
        rows = rows.iter().flat_map(|row| bindings.iter().map(move |b| [row.as_slice(), std::slice::from_ref(b)].concat())).collect();
    }
    Ok(rows)
}

fn parameter_name(parameter: &GenericParam) -> Option<&Ident> {
    match parameter {
        GenericParam::Type(p) => Some(&p.ident),
        GenericParam::Const(p) => Some(&p.ident),
        GenericParam::Lifetime(_) => None,
    }
}

fn bindings_of(parameter: &GenericParam, choice: &Choice) -> Result<Vec<Binding>> {
    let name = choice.parameter.clone();
    let bindings: Vec<_> = match parameter {
        GenericParam::Type(_) => choice.values.iter().map(|v| Binding::Type { parameter: name.clone(), value: v.clone() }).collect(),
        GenericParam::Const(p) => {
            choice.constants.iter().map(|v| Binding::Const { parameter: name.clone(), ty: p.ty.clone(), value: v.clone() }).collect()
        }
        GenericParam::Lifetime(_) => Vec::new(),
    };
    if bindings.is_empty() {
        return Err(Error::new(Span::call_site().located_at(name.span()), format!("`{name}` needs at least one value")));
    }
    Ok(bindings)
}

#[cfg(test)]
mod tests {
    use super::half;

    #[test]
    fn numbered_kernels_are_in_both_halves() {
        let first = (0..16).filter(|number| half(&format!("write_{number}")) == "0").count();
        assert!((4..=12).contains(&first), "{first} of 16");
    }
}
