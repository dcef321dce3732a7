//! `#[derive(SharedStorage)]`.

use proc_macro2::TokenStream;
use quote::{format_ident, quote, quote_spanned};
use syn::{Data, DeriveInput, Error, Fields, Result};

pub fn expand(item: DeriveInput) -> Result<TokenStream> {
    let Data::Struct(data) = &item.data else {
        return Err(Error::new_spanned(&item.ident, "SharedStorage is derived for structs: one field a piece of the arena"));
    };
    let Fields::Named(fields) = &data.fields else {
        return Err(Error::new_spanned(&item.ident, "SharedStorage wants named fields: the names appear in the emulator's reports"));
    };
    let name = &item.ident;
    let (generics, type_generics, bounds) = item.generics.split_for_impl();
    let mut end = quote!(0u32);
    let (mut offsets, mut inits, mut aligns, mut names, mut sizes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for field in &fields.named {
        let (ident, ty) = (&field.ident, &field.ty);
        let offset = format_ident!("__OFFSET_{}", ident.as_ref().expect("a named field").to_string().to_uppercase());
        offsets.push(quote! {
            #[doc(hidden)]
            const #offset: u32 = (#end).next_multiple_of(<#ty as ::oxtile_tile::shared::SharedStorage>::ALIGN);
        });
        inits.push(quote! {
            // SAFETY: the caller vouches for the whole; `SIZE` counts this field at its offset, aligned.
            #ident: unsafe { <#ty as ::oxtile_tile::shared::SharedStorage>::at(address + Self::#offset) }
        });
        names.push(quote!(::oxtile_tile::shared::name_field::<#ty>(stringify!(#ident), Self::#offset, offset, bytes, name)?));
        aligns.push(quote!(<#ty as ::oxtile_tile::shared::SharedStorage>::ALIGN));
        end = quote!(Self::#offset + <#ty as ::oxtile_tile::shared::SharedStorage>::SIZE);
        sizes.push(quote!((stringify!(#ident), <#ty as ::oxtile_tile::shared::SharedStorage>::SIZE)));
    }
    // What is too large is shown at the struct's name.
    let size = quote_spanned! { name.span() =>
        ::oxtile_tile::shared::checked_size(
            stringify!(#name),
            (#end).next_multiple_of(<Self as ::oxtile_tile::shared::SharedStorage>::ALIGN),
            &[#(#sizes),*],
        )
    };
    Ok(quote! {
        impl #generics #name #type_generics #bounds {
            #(#offsets)*

            /// The block's arena, as this layout. Every thread gets the same addresses.
            #[inline(always)]
            #[track_caller]
            pub fn claim() -> Self {
                // SAFETY: the arena starts here, 1024-byte aligned; that it has `SIZE` bytes, since the kernel says
                // `shared = ...` of this layout, the emulator checks here.
                unsafe { <Self as ::oxtile_tile::shared::SharedStorage>::at(::oxtile_tile::shared::claim::<Self>(stringify!(#name))) }
            }
        }

        impl #generics ::oxtile_tile::shared::SharedStorage for #name #type_generics #bounds {
            const ALIGN: u32 = ::oxtile_tile::shared::max_align(&[#(#aligns),*]);
            const SIZE: u32 = #size;

            #[inline(always)]
            unsafe fn at(address: u32) -> Self {
                Self { #(#inits),* }
            }

            #[inline]
            fn name_part(offset: u32, bytes: u32, name: &mut dyn ::core::fmt::Write) -> ::core::fmt::Result {
                let _ = false #(|| #names)*;
                ::core::result::Result::Ok(())
            }
        }
    })
}
