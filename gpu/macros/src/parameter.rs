//! `#[derive(Parameter)]`.

use proc_macro2::{Ident, TokenStream};
use quote::{ToTokens, format_ident, quote};
use syn::{Data, DeriveInput, Error, Field, Fields, GenericParam, Result, Type};

use crate::kernel::{MOST_WORDS, identifiers};

pub fn expand(item: DeriveInput) -> Result<TokenStream> {
    let Data::Struct(data) = &item.data else {
        return Err(Error::new_spanned(&item.ident, "Parameter is derived for structs: one field a kernel parameter"));
    };
    let Fields::Named(fields) = &data.fields else {
        return Err(Error::new_spanned(&item.ident, "Parameter wants named fields: the names appear in errors and reports"));
    };
    let fields: Vec<_> = fields.named.iter().collect();
    let optional = is_optional(&item)?;
    let (name, names) = (&item.ident, fields.iter().map(|f| f.ident.as_ref().expect("a named field")).collect::<Vec<_>>());
    let types: Vec<_> = fields.iter().map(|f| &f.ty).collect();
    let (impl_generics, type_generics, clause) = item.generics.split_for_impl();
    let launch = quote!(::oxtile_tile::launch);
    let (argument, argument_item) = argument_of(&item, &fields);
    // The words after each field, the last first.
    let mut lists = vec![quote!(Rest)];
    for ty in types.iter().rev() {
        let rest = lists.last().expect("one at least");
        lists.push(quote!(<#ty as #launch::Parameter>::Words<#rest>));
    }
    let words = lists.pop().expect("one at least");
    lists.reverse();
    let most = MOST_WORDS;
    let too_many =
        format!("`{name}` must be at most {most} words: take it apart into two parameters; a view is two words, a number is one");
    let optional = optional.then(|| optional_item(&item, &names, &types));
    Ok(quote! {
        #argument_item

        // SAFETY: one field after the other, each of which packs what it names.
        unsafe impl #impl_generics #launch::Parameter for #name #type_generics #clause {
            type Argument<'a> = #argument;
            type Words<Rest: #launch::WordList> = #words;
            const WORDS: usize = {
                let words = 0 #(+ <#types as #launch::Parameter>::WORDS)*;
                assert!(words <= #most, #too_many);
                words
            };

            fn pack(argument: &Self::Argument<'_>, words: &mut #launch::ArgumentWords) {
                #(<#types as #launch::Parameter>::pack(&argument.#names, words);)*
            }

            fn access<'s>(
                argument: &'s Self::Argument<'_>,
                name: #launch::ParameterName,
                visit: &mut dyn FnMut(#launch::BufferAccess<'s>),
            ) {
                #(<#types as #launch::Parameter>::access(&argument.#names, name.field(stringify!(#names)), visit);)*
            }

            fn unpack(__words: &mut #launch::WordReader<'_>) -> Self {
                #(let #names = <#types as #launch::Parameter>::unpack(__words);)*
                Self { #(#names),* }
            }

            #[inline(always)]
            unsafe fn take<Rest: #launch::WordList>(__words: Self::Words<Rest>) -> (Self, Rest) {
                #(
                    // SAFETY: passed on to the caller.
                    let (#names, __words) = unsafe { <#types as #launch::Parameter>::take::<#lists>(__words) };
                )*
                (Self { #(#names),* }, __words)
            }
        }

        #optional
    })
}

/// Whether `#[parameter(optional)]` stands there.
fn is_optional(item: &DeriveInput) -> Result<bool> {
    let mut optional = false;
    for attribute in item.attrs.iter().filter(|a| a.path().is_ident("parameter")) {
        attribute.parse_nested_meta(|meta| {
            optional |= meta.path.is_ident("optional");
            if optional { Ok(()) } else { Err(meta.error("#[parameter] knows `optional`")) }
        })?;
    }
    Ok(optional)
}

/// The type of the argument. It is the struct itself where all fields are numbers, else a struct of the fields' arguments.
fn argument_of(item: &DeriveInput, fields: &[&Field]) -> (TokenStream, Option<TokenStream>) {
    if fields.iter().all(|field| is_number(&field.ty)) {
        return (quote!(Self), None);
    }
    let (name, vis) = (&item.ident, &item.vis);
    let argument = format_ident!("{name}Argument");
    let mut generics = item.generics.clone();
    let types: Vec<_> = generics.type_params().map(|p| p.ident.clone()).collect();
    generics.params.insert(0, syn::parse_quote!('a));
    let (_, type_generics, clause) = generics.split_for_impl();
    let declared = generics.params.iter().map(|parameter| match parameter {
        // Defaults are of the struct alone.
        GenericParam::Type(p) => {
            let (ident, bounds) = (&p.ident, &p.bounds);
            quote!(#ident: #bounds)
        }
        GenericParam::Const(p) => {
            let (ident, ty) = (&p.ident, &p.ty);
            quote!(const #ident: #ty)
        }
        GenericParam::Lifetime(p) => p.to_token_stream(),
    });
    let docs = fields.iter().map(|f| f.attrs.iter().filter(|a| a.path().is_ident("doc")).collect::<Vec<_>>());
    let (names, tys) = (fields.iter().map(|f| &f.ident), fields.iter().map(|f| &f.ty));
    let doc = format!("The host's side of [`{name}`].");
    let unnamed: Vec<_> = types.iter().filter(|ident| !fields.iter().any(|f| names_it(&f.ty, ident))).collect();
    let marker = (!unnamed.is_empty()).then(|| {
        quote!(#[doc = "Names the type parameters that no field names: `PhantomData`."] pub marker: ::core::marker::PhantomData<fn() -> (#(#unnamed,)*)>,)
    });
    let item = quote! {
        #[doc = #doc]
        #vis struct #argument <#(#declared),*> #clause {
            #(#(#docs)* pub #names: <#tys as ::oxtile_tile::launch::Parameter>::Argument<'a>,)*
            #marker
        }
    };
    (quote!(#argument #type_generics), Some(item))
}

/// `Option` of the struct is a parameter too: absent as its first field is.
fn optional_item(item: &DeriveInput, names: &[&Ident], types: &[&Type]) -> TokenStream {
    let (impl_generics, type_generics, clause) = item.generics.split_for_impl();
    let (name, launch) = (&item.ident, quote!(::oxtile_tile::launch));
    let ((first, first_type), (others, other_types)) = ((&names[0], &types[0]), (&names[1..], &types[1..]));
    quote! {
        // SAFETY: the first field's words say whether it is there; the others are as many as they are.
        unsafe impl #impl_generics #launch::OptionalParameter for #name #type_generics #clause {
            fn pack_present(argument: &Self::Argument<'_>, words: &mut #launch::ArgumentWords) {
                <#first_type as #launch::OptionalParameter>::pack_present(&argument.#first, words);
                #(<#other_types as #launch::Parameter>::pack(&argument.#others, words);)*
            }

            fn pack_absent(words: &mut #launch::ArgumentWords) {
                <#first_type as #launch::OptionalParameter>::pack_absent(words);
                for _ in 0..(0 #(+ <#other_types as #launch::Parameter>::WORDS)*) {
                    words.push(0);
                }
            }

            #[inline(always)]
            fn is_absent(&self) -> bool {
                <#first_type as #launch::OptionalParameter>::is_absent(&self.#first)
            }
        }
    }
}

fn is_number(ty: &Type) -> bool {
    let Type::Path(path) = ty else { return false };
    ["u32", "u64", "i32", "i64", "f32", "bool"].iter().any(|number| path.path.is_ident(number))
}

fn names_it(ty: &Type, ident: &Ident) -> bool {
    identifiers(ty.to_token_stream()).contains(ident)
}
