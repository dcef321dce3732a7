//! `#[kernel]`.

use proc_macro2::{Span, TokenStream, TokenTree};
use quote::{ToTokens, format_ident, quote};
use syn::parse::{Parse, ParseStream};
use syn::{Error, Expr, FnArg, Ident, ItemFn, Pat, Path, Result, ReturnType, Token, Type};

use crate::instances::{self, Binding, Instance};
use crate::names;

/// What stands in the parentheses of `#[kernel(...)]`.
pub struct Options {
    threads: Expr,
    grid: Path,
    shared: Option<Type>,
    min_blocks: Option<Expr>,
    cluster: Option<Expr>,
    requires: Option<Ident>,
}

impl Parse for Options {
    fn parse(input: ParseStream) -> Result<Self> {
        let (mut threads, mut grid, mut shared, mut min_blocks, mut cluster, mut requires) = (None, None, None, None, None, None);
        while !input.is_empty() {
            let key: Ident = input.parse()?;
            input.parse::<Token![=]>()?;
            match key.to_string().as_str() {
                "threads" => threads = Some(input.parse()?),
                "grid" => grid = Some(input.parse()?),
                "shared" => shared = Some(input.parse()?),
                "min_blocks" => min_blocks = Some(input.parse()?),
                "cluster" => cluster = Some(input.parse()?),
                "requires" => requires = Some(names::architecture(input.parse()?)?),
                other => {
                    let known = "threads, grid, shared, min_blocks, cluster, requires";
                    return Err(Error::new(key.span(), format!("unknown option `{other}`; #[kernel] knows {known}")));
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        let missing = |what: &str| Error::new(Span::call_site(), format!("#[kernel] needs {what}"));
        Ok(Self {
            threads: threads.ok_or_else(|| missing("the threads of a block, a multiple of 32: `threads = 256`"))?,
            grid: grid.ok_or_else(|| missing("the function that checks the arguments and derives the grid: `grid = grid`"))?,
            shared,
            min_blocks,
            cluster,
            requires,
        })
    }
}

struct Parameter {
    name: Ident,
    ty: Type,
    doc: String,
}

/// Everything the generated items share.
struct Expansion {
    options: Options,
    function: ItemFn,
    parameters: Vec<Parameter>,
    marker: Ident,
    args: Ident,
    family: String,
}

pub fn expand(options: Options, mut function: ItemFn) -> Result<TokenStream> {
    let (instance_attributes, attributes) = function.attrs.drain(..).partition(|a| a.path().is_ident("instances"));
    function.attrs = attributes;
    let parameters = check_signature(&function)?;
    let instances = instances::expand(&instance_attributes, &function.sig.generics, &function.sig.ident)?;
    let camel = names::camel_case(&function.sig.ident.to_string());
    let expansion = Expansion {
        marker: format_ident!("{camel}"),
        args: format_ident!("{camel}Args"),
        family: names::family_of(&Span::call_site().unwrap().file()),
        options,
        function,
        parameters,
    };
    let items = instances.iter().map(|i| expansion.instance(i));
    let (marker, args, family) = (expansion.marker_item(), expansion.args_item(), expansion.family_item(&instances));
    let (function, signature) = (&expansion.function, expansion.signature_item());
    Ok(quote! {
        #[inline(always)]
        #function
        #marker
        #args
        #signature
        #(#items)*
        #family
    })
}

fn check_signature(function: &ItemFn) -> Result<Vec<Parameter>> {
    let signature = &function.sig;
    if let ReturnType::Type(_, ty) = &signature.output {
        return Err(Error::new_spanned(ty, "a kernel returns nothing: write the result to a GlobalMut<T> parameter"));
    }
    if signature.asyncness.is_some() || signature.variadic.is_some() {
        return Err(Error::new_spanned(signature, "a kernel is a plain function"));
    }
    signature.inputs.iter().map(check_parameter).collect()
}

fn check_parameter(input: &FnArg) -> Result<Parameter> {
    let FnArg::Typed(input) = input else {
        return Err(Error::new_spanned(input, "a kernel is a free function: it has no `self`"));
    };
    let Pat::Ident(pattern) = &*input.pat else {
        return Err(Error::new_spanned(&input.pat, "a kernel parameter is a plain name: it becomes a field of the argument struct"));
    };
    match &*input.ty {
        Type::Reference(r) if r.mutability.is_some() => Err(Error::new_spanned(
            &input.ty,
            "every thread would hold this `&mut`, which Rust forbids: take `GlobalMut<T>`, whose stores name an element",
        )),
        Type::Reference(_) | Type::Slice(_) => {
            Err(Error::new_spanned(&input.ty, "a kernel takes device memory as `Global<T>` (read only) or `GlobalMut<T>`"))
        }
        Type::Ptr(_) => Err(Error::new_spanned(
            &input.ty,
            "a raw pointer has no length to check: take `Global<T>` or `GlobalMut<T>`; they are flattened to pointers at the entry",
        )),
        ty => Ok(Parameter { doc: format!("The kernel's parameter `{}`.", pattern.ident), name: pattern.ident.clone(), ty: ty.clone() }),
    }
}

impl Expansion {
    /// `pub struct Amax<T>(PhantomData<..>);`
    fn marker_item(&self) -> TokenStream {
        let (marker, vis, generics) = (&self.marker, &self.function.vis, &self.function.sig.generics);
        let clause = &generics.where_clause;
        let types = generics.type_params().map(|p| &p.ident);
        let doc = format!("Names the kernel [`{}`](fn@{0}): load and launch it by this type.", self.function.sig.ident);
        quote! {
            #[doc = #doc]
            #vis struct #marker #generics (::core::marker::PhantomData<fn() -> (#(#types,)*)>) #clause;
        }
    }

    /// `impl Signature for Amax<T>`, for any `T`.
    fn signature_item(&self) -> TokenStream {
        let (marker, args) = (&self.marker, &self.args);
        let (impl_generics, type_generics, clause) = self.function.sig.generics.split_for_impl();
        let mut of_args = self.function.sig.generics.clone();
        of_args.params.insert(0, syn::parse_quote!('a));
        let (_, args_generics, _) = of_args.split_for_impl();
        quote! {
            impl #impl_generics ::oxtile_tile::launch::Signature for #marker #type_generics #clause {
                type Args<'a> = #args #args_generics;
            }
        }
    }

    /// `pub struct AmaxArgs<'a, T> { pub input: DeviceView<'a, T>, .. }` and its `KernelArgs`.
    fn args_item(&self) -> TokenStream {
        let (args, vis) = (&self.args, &self.function.vis);
        let mut generics = self.function.sig.generics.clone();
        generics.params.insert(0, syn::parse_quote!('a));
        let (impl_generics, type_generics, clause) = generics.split_for_impl();
        let names: Vec<_> = self.parameters.iter().map(|p| &p.name).collect();
        let types: Vec<_> = self.parameters.iter().map(|p| &p.ty).collect();
        let docs = self.parameters.iter().map(|p| &p.doc);
        let doc = format!("The arguments of [`{}`].", self.marker);
        let rest = self.unnamed_parameters();
        quote! {
            #[doc = #doc]
            #vis struct #args #impl_generics #clause {
                #(#[doc = #docs] pub #names: <#types as ::oxtile_tile::launch::Parameter>::Argument<'a>,)*
                #rest
            }

            // SAFETY: one `Parameter` after the other, each of which packs what it names.
            unsafe impl #impl_generics ::oxtile_tile::launch::KernelArgs for #args #type_generics #clause {
                fn pack(&self, words: &mut ::oxtile_tile::launch::ArgumentWords) {
                    #(<#types as ::oxtile_tile::launch::Parameter>::pack(&self.#names, words);)*
                }

                fn accesses<'s>(&'s self, visit: &mut dyn FnMut(::oxtile_tile::launch::BufferAccess<'s>)) {
                    #(<#types as ::oxtile_tile::launch::Parameter>::access(&self.#names, ::oxtile_tile::launch::ParameterName::new(stringify!(#names)), visit);)*
                }
            }
        }
    }

    /// The field for what no argument's type names: Rust wants every parameter of a struct used.
    fn unnamed_parameters(&self) -> Option<TokenStream> {
        let named: Vec<_> = self.parameters.iter().flat_map(|p| identifiers(p.ty.to_token_stream())).collect();
        let types = self.function.sig.generics.type_params().map(|p| &p.ident);
        let unnamed: Vec<_> = types.filter(|ident| !named.contains(ident)).collect();
        let wanted = !unnamed.is_empty() || self.parameters.is_empty();
        wanted.then(|| {
            let doc = "Names the type parameters that no argument names: `PhantomData`.";
            quote!(#[doc = #doc] pub marker: ::core::marker::PhantomData<fn(&'a ()) -> (#(#unnamed,)*)>,)
        })
    }

    /// `impl Kernel` and the PTX entry of one instance, in a scope where the generic parameters are bound.
    fn instance(&self, instance: &Instance) -> TokenStream {
        let bindings = instance.bindings.iter().map(|b| match b {
            Binding::Type { parameter, value } => quote!(type #parameter = #value;),
            Binding::Const { parameter, ty, value } => quote!(const #parameter: #ty = #value;),
        });
        let generics: Vec<_> = instance.bindings.iter().map(binding_argument).collect();
        let (info, body) = (self.info(instance), self.emulated_body(&generics));
        let (marker, args, grid) = (&self.marker, &self.args, &self.options.grid);
        let (entry, metadata) = (self.entry(instance, &generics), self.metadata(instance));
        let name = instance.entry_name(&self.function.sig.ident);
        let replacement = format!("{}{name}", REPLACEMENT);
        quote! {
            #metadata

            #[allow(unexpected_cfgs, dead_code, non_camel_case_types)]
            const _: () = {
                #(#bindings)*

                // SAFETY: the entry, `emulate`, the arguments and the facts are made here of one signature.
                unsafe impl ::oxtile_tile::launch::Kernel for #marker<#(#generics),*> {
                    const INFO: ::oxtile_tile::launch::KernelInfo = #info;

                    fn grid(
                        args: &#args<'_, #(#generics),*>,
                        device: &::oxtile_tile::launch::DeviceLimits,
                    ) -> ::core::result::Result<::oxtile_tile::launch::Grid, ::oxtile_tile::launch::LaunchError> {
                        #grid(args, device)
                    }

                    #[cfg(all(not(target_arch = "nvptx64"), any(not(oxtile_replacement), oxtile_kernel = #name)))]
                    fn emulate(words: &[u64]) {
                        #body
                    }

                    #[cfg(any(target_arch = "nvptx64", all(oxtile_replacement, not(oxtile_kernel = #name))))]
                    fn emulate(_: &[u64]) {}
                }

                // By this name a program that was compiled before finds it (`oxtile_emulator::replacement`).
                #[cfg(all(oxtile_replacement, oxtile_kernel = #name))]
                #[unsafe(export_name = #replacement)]
                pub fn replacement(words: &[u64]) {
                    <#marker<#(#generics),*> as ::oxtile_tile::launch::Kernel>::emulate(words);
                }

                #entry
            };
        }
    }

    fn info(&self, instance: &Instance) -> TokenStream {
        let (name, family) = (instance.entry_name(&self.function.sig.ident), &self.family);
        let threads = &self.options.threads;
        let min_blocks = self.options.min_blocks.as_ref().map_or(quote!(1), |e| quote!(#e));
        let cluster = self.options.cluster.as_ref().map_or(quote!(1), |e| quote!(#e));
        let shared = self.options.shared.as_ref().map_or(quote!(0), |ty| quote!(<#ty as ::oxtile_tile::shared::SharedStorage>::SIZE));
        let requires = self.options.requires.as_ref().map(Ident::to_string).unwrap_or_default();
        let names = self.parameters.iter().map(|p| p.name.to_string());
        let types = self.parameters.iter().map(|p| &p.ty);
        let launch = quote!(::oxtile_tile::launch);
        quote! {
            #launch::KernelInfo {
                name: #name,
                family: #family,
                package: env!("CARGO_PKG_NAME"),
                // The crate's own if its root has one, else that of the outer scope.
                source_hash: { use #launch::OXTILE_SOURCE_HASH; { use crate::*; &OXTILE_SOURCE_HASH } },
                threads: #threads,
                min_blocks: #min_blocks,
                cluster: #cluster,
                shared_bytes: #shared,
                requires: #requires,
                parameters: &[#(#names),*],
                words: (0 #(+ <#types as #launch::Parameter>::WORDS)*) as u32,
            }
            .checked()
        }
    }

    fn emulated_body(&self, generics: &[TokenStream]) -> TokenStream {
        let (function, types) = (&self.function.sig.ident, self.parameters.iter().map(|p| &p.ty));
        let turbofish = turbofish(generics);
        let names = self.parameters.iter().map(|p| &p.name);
        let call = self.parameters.iter().map(|p| &p.name);
        quote! {
            ::oxtile_tile::emulated! {
                let mut __words = ::oxtile_tile::launch::WordReader::new(words);
                #(let #names = <#types as ::oxtile_tile::launch::Parameter>::unpack(&mut __words);)*
                #function #turbofish (#(#call),*)
            }
        }
    }

    /// The `extern "ptx-kernel"` function: one pointer or number for each word of the parameters, as
    /// [`WordList`](../oxtile_tile/launch/trait.WordList.html) lays them out.
    fn entry(&self, instance: &Instance, generics: &[TokenStream]) -> TokenStream {
        let (name, family) = (instance.entry_name(&self.function.sig.ident), &self.family);
        let (function, turbofish, gate, half) = (&self.function.sig.ident, turbofish(generics), self.gate(), instances::half(&name));
        let launch = quote!(::oxtile_tile::launch);
        let most = self.parameters.iter().map(|p| most_words(&p.ty)).sum::<usize>().min(MOST_WORDS);
        // The words of each parameter and of those after it, the last first.
        let mut lists = vec![quote!(())];
        for parameter in self.parameters.iter().rev() {
            let (ty, rest) = (&parameter.ty, lists.last().expect("one at least"));
            lists.push(quote!(<#ty as #launch::Parameter>::Words<#rest>));
        }
        let whole = lists.pop().expect("one at least");
        let list: Vec<_> = (0..most + 1).map(|i| format_ident!("Words{i}")).collect();
        let word: Vec<_> = (0..most).map(|i| format_ident!("word_{i}")).collect();
        let (now, next) = (&list[..most], &list[1..]);
        let first = &list[0];
        let words =
            word.iter().zip(now).rev().fold(quote!(()), |tail, (word, list)| quote!(<#list as #launch::WordList>::new(#word, #tail)));
        let takes = self.parameters.iter().rev().zip(&lists).map(|(p, rest)| {
            let (parameter, ty) = (&p.name, &p.ty);
            quote! {
                // SAFETY: the one caller is the launcher, which packs these words from the argument struct of this very
                // instance (`KernelArgs::pack`).
                let (#parameter, __words) = unsafe { <#ty as #launch::Parameter>::take::<#rest>(__words) };
            }
        });
        let takes: Vec<_> = takes.collect();
        let takes = takes.iter().rev();
        let types = self.parameters.iter().map(|p| &p.ty);
        let (info, call) = (self.info_of(instance), self.parameters.iter().map(|p| &p.name));
        quote! {
            #[cfg(all(target_arch = "nvptx64", any(all(oxtile_family = #family, not(oxtile_without = #half)), oxtile_kernel = #name)))]
            #gate
            const _: () = {
                type #first = #whole;
                #(type #next = <#now as #launch::WordList>::Tail;)*
                const { assert!(0 #(+ <#types as #launch::Parameter>::WORDS)* <= #most, "more words than an entry has parameters") };

                #[allow(improper_ctypes_definitions)]
                #[unsafe(export_name = #name)]
                pub unsafe extern "ptx-kernel" fn entry(#(#word: <#now as #launch::WordList>::Head),*) {
                    if const { #info.begins_early() } {
                        #launch::wait_for_launches();
                    }
                    let __words: #first = #words;
                    #(#takes)*
                    #function #turbofish (#(#call),*)
                }
            };
        }
    }

    /// The comment line that tells `oxtile-build` what this instance needs. It stands at module
    /// level, where `global_asm!` must, so the instance is named by its values.
    fn metadata(&self, instance: &Instance) -> TokenStream {
        let (name, family) = (instance.entry_name(&self.function.sig.ident), &self.family);
        let requires = self.options.requires.as_ref().map(Ident::to_string).unwrap_or_default();
        let parameters = self.parameters.iter().map(|p| format!("\"{}\"", p.name)).collect::<Vec<_>>().join(",");
        let line = format!(
            "// oxtile.kernel {{{{\"name\":\"{name}\",\"family\":\"{family}\",\"threads\":[{{}},1,1],\"min_blocks\":{{}},\
             \"cluster\":{{}},\"shared\":{{}},\"requires\":\"{requires}\",\"params\":[{parameters}],\"words\":{{}},\"hashed\":{{}}}}}}"
        );
        let (gate, info, half) = (self.gate(), self.info_of(instance), instances::half(&name));
        let module = format_ident!("__metadata_of_{name}");
        quote! {
            #[allow(unexpected_cfgs, unused_imports)]
            mod #module {
                use super::*;

                #[cfg(all(target_arch = "nvptx64", any(all(oxtile_family = #family, not(oxtile_without = #half)), oxtile_kernel = #name)))]
                #gate
                ::core::arch::global_asm!(#line, const #info.threads, const #info.min_blocks, const #info.cluster, const #info.shared_bytes, const #info.words, const !#info.source_hash.is_empty() as u32);
            }
        }
    }

    /// Leaves the instance out where the compiled architecture lacks what it requires.
    fn gate(&self) -> Option<TokenStream> {
        let feature = self.options.requires.as_ref()?.to_string();
        Some(quote!(#[cfg(target_feature = #feature)]))
    }

    /// `<Amax<bf16> as Kernel>::INFO`, outside the instance's own scope.
    fn info_of(&self, instance: &Instance) -> TokenStream {
        let marker = &self.marker;
        let values = instance.bindings.iter().map(|b| match b {
            Binding::Type { value, .. } => quote!(#value),
            Binding::Const { value, .. } => quote!({ #value }),
        });
        quote!(<#marker<#(#values),*> as ::oxtile_tile::launch::Kernel>::INFO)
    }

    /// `pub const AMAX: KernelFamily`, the registry's entry.
    fn family_item(&self, instances: &[Instance]) -> TokenStream {
        let vis = &self.function.vis;
        let name = self.function.sig.ident.to_string();
        let constant = format_ident!("{}", name.to_uppercase());
        let doc = format!("The compiled instances of [`{name}`](fn@{name}).");
        let entries = instances.iter().map(|instance| self.info_of(instance));
        quote! {
            #[doc = #doc]
            #vis const #constant: ::oxtile_tile::launch::KernelFamily =
                ::oxtile_tile::launch::KernelFamily { name: #name, instances: &[#(#entries),*] };
        }
    }
}

fn binding_argument(binding: &Binding) -> TokenStream {
    match binding {
        Binding::Type { parameter, .. } => quote!(#parameter),
        Binding::Const { parameter, .. } => quote!({ #parameter }),
    }
}

/// How the symbol begins by which the emulator finds one kernel in a library: `oxtile_emulator::replacement::SYMBOL`.
const REPLACEMENT: &str = "oxtile_emulate_";

/// The most words that an entry takes: `ArgumentWords::CAPACITY`.
pub const MOST_WORDS: usize = 64;

/// As many words as the type has; as many as an entry takes if it is a struct, whose words are not known here.
fn most_words(ty: &Type) -> usize {
    let Type::Path(path) = ty else { return MOST_WORDS };
    let last = path.path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default();
    match last.as_str() {
        "u32" | "u64" | "i32" | "i64" | "f32" | "bool" | "TensorMap" | "TensorMapMut" => 1,
        "Global" | "GlobalMut" | "GlobalTable" => 2,
        _ => MOST_WORDS,
    }
}

/// All identifiers of a type, at any depth.
pub fn identifiers(tokens: TokenStream) -> Vec<Ident> {
    let of_tree = |tree| match tree {
        TokenTree::Ident(ident) => vec![ident],
        TokenTree::Group(group) => identifiers(group.stream()),
        TokenTree::Punct(_) | TokenTree::Literal(_) => Vec::new(),
    };
    tokens.into_iter().flat_map(of_tree).collect()
}

fn turbofish(generics: &[TokenStream]) -> TokenStream {
    if generics.is_empty() { quote!() } else { quote!(::<#(#generics),*>) }
}
